"""How a process that is to serve for long treats its memory. It decides for all of the process: it is for programs, not
for a library inside one."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

LARGE_BYTES = 1 << 20
"""Blocks from here on, such as a message with a long prompt, are mapped for themselves. What is free at the end of a
heap goes back from so much on."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's <malloc.h>


def give_large_blocks_back() -> None:
    """From now on, large blocks go back to the system as soon as they are freed.

    By itself glibc takes the largest block that was ever freed, up to 32 MiB, for a size to keep in the heaps, of which
    threads have their own, and lets twice as much lie free in each. Not for a process that computes: it needs such
    blocks again at once, and zeroed pages take time.
    """
    with suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES)


def set_apart_what_stays() -> None:
    """What has been made by now stays: Python's collector passes over it from now on.

    It would look at all of it again, now and then, for a tenth of a second in which nobody is answered. And it comes to
    old objects when there are a quarter more than the last time: the second look is for that to be soon.
    """
    gc.collect()
    gc.freeze()
    gc.collect()

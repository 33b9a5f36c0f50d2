"""What a process that serves does with large blocks. In a process of its own: it decides for all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cli import ROOT

MAPPED = """
import ctypes
from actorpp.cli.memory import LARGE_BYTES, give_large_blocks_back

class Info(ctypes.Structure):
    _fields_ = [("others", 4 * ctypes.c_size_t), ("mapped", ctypes.c_size_t), ("rest", 5 * ctypes.c_size_t)]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
{call}
bytes(16 * LARGE_BYTES)  # freed at once
before = mallinfo().mapped
block = bytes(2 * LARGE_BYTES)
print(mallinfo().mapped - before >= len(block))
"""


@pytest.mark.parametrize(("call", "mapped"), [("", "False"), ("give_large_blocks_back()", "True")])
def test_large_blocks_go_back_whatever_was_freed_before(call: str, mapped: str) -> None:
    """They are mapped for themselves; by itself glibc keeps such sizes from the first that was freed on."""
    code = MAPPED.format(call=call)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == mapped

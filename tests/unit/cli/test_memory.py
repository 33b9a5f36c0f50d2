"""What a process that serves does with its memory. In a process of its own: it decides for all of it."""

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

COLLECTED = """
import gc, weakref
from actorpp.cli.memory import set_apart_what_stays

class Node:
    def __init__(self):
        self.own = self

there = [[] for _ in range(300_000)]
gc.collect()
{call}
nodes = [Node() for _ in range(4000)]
gc.collect(1)  # they are old now
looks = [weakref.ref(node) for node in nodes]
del nodes
for _ in range(200):  # each of them sets the collector off, and leaves it next to nothing
    more = [[] for _ in range(800)]
print(not any(look() for look in looks))
"""


@pytest.mark.parametrize(("call", "mapped"), [("", "False"), ("give_large_blocks_back()", "True")])
def test_large_blocks_go_back_whatever_was_freed_before(call: str, mapped: str) -> None:
    """They are mapped for themselves; by itself glibc keeps such sizes from the first that was freed on."""
    assert told(MAPPED.format(call=call)) == mapped


@pytest.mark.parametrize(("call", "collected"), [("", "False"), ("set_apart_what_stays()", "True")])
def test_the_collector_soon_comes_to_what_was_made_since(call: str, collected: str) -> None:
    """Beside all that was there before, it would not have come for so few."""
    assert told(COLLECTED.format(call=call)) == collected


def told(code: str) -> str:
    """What a process of its own prints."""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout.strip()

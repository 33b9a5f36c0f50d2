"""The library for x86 CPUs with a tile unit (AMX): where it is, and what it is given.

It computes attention (``amx_attention.c``), linear layers (``amx_linear.c``) and what stands between a layer's matrix
products (``amx_rows.c``), and is compiled when the package is installed, if there is a C compiler. No torch here, so
that the driver can ask whether stages will have it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import Any

from actorpp.errors import ConfigError

LIBRARY = "actorpp.stages._amx"

INTERFACE = 2
"""What this module takes the library's functions to be; the same number stands in ``amx.h``, and both are raised with
every change of a function."""


class Side(ctypes.Structure):
    """Queries, keys, values or results: number (head, token, i) is at head * head_stride + token * token_stride + i."""

    _fields_ = (("data", ctypes.c_void_p), ("head_stride", ctypes.c_int64), ("token_stride", ctypes.c_int64))


class AttentionStep(ctypes.Structure):
    """One layer of a packed step, as the library takes it.

    Attributes:
        lse: (tokens, heads) float32, or None.
        segments: (num_segments, 4) int64: first token in the packed row, tokens, first run, number of runs.
        runs: (n, 2) int64: first slot, length.
        window: As ``Scoring.window``; 0: none.
    """

    _fields_ = (
        ("query", Side),
        ("key", Side),
        ("value", Side),
        ("out", Side),
        ("lse", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("key_width", ctypes.c_int64),
        ("value_width", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


@cache
def library() -> Any:
    """The library, ready to compute; None where it was not compiled or the CPU has no tile unit.

    Raises:
        ConfigError: It was compiled from other sources than these.
    """
    spec = find_spec(LIBRARY)
    if spec is None or spec.origin is None:
        return None
    loaded = ctypes.CDLL(spec.origin)
    interface = getattr(loaded, "actorpp_amx_interface", None)
    if interface is None or interface() != INTERFACE:
        raise ConfigError(f"{spec.origin} is not of this version: install again (pip install .)")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.actorpp_rms_norm.argtypes = (*[pointer] * 3, *[number] * 2, ctypes.c_float)
    loaded.actorpp_rotate.argtypes = (*[pointer] * 3, *[number] * 4)
    loaded.actorpp_file.argtypes = (*[pointer] * 3, *[number] * 6)
    loaded.actorpp_amx_linear.argtypes = (*[pointer] * 5, *[number] * 3, *[ctypes.c_int32] * 2)
    return loaded if loaded.actorpp_amx_start() == 0 else None


def attend(step: AttentionStep) -> None:
    """Compute ``step``, without Python's lock. Raises MemoryError."""
    if library().actorpp_amx_attend(ctypes.byref(step)):
        raise MemoryError("no memory for the attention of a step")

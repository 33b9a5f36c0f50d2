"""The library for x86 CPUs that multiply bfloat16, on tiles (AMX) or vectors (AVX512-BF16): where it is, and what it
is given.

It computes attention (``native_attention.c``), linear layers (``native_linear.c``), what stands between a layer's
matrix products (``native_rows.c``) and whole layers (``native_layer.c``), and is compiled when the package is
installed, if there is a C compiler. No torch here, so that the driver can ask whether stages will have it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import Any

from actorpp.errors import ConfigError

NOTHING, VECTORS, TILES = range(3)
"""What matrix products are computed on, the slowest first."""

LIBRARY = "actorpp.stages._native"

INTERFACE = 8
"""What this module takes the library's functions to be; the same number stands in ``native.h``, and both are raised
with every change of a function."""


class Side(ctypes.Structure):
    """Queries, keys, values or results: number (head, token, i) is at head * head_stride + token * token_stride + i.

    Of queries and results only each 32 numbers lie side by side: ``AttentionStep.group_stride``.
    """

    _fields_ = (("data", ctypes.c_void_p), ("head_stride", ctypes.c_int64), ("token_stride", ctypes.c_int64))


class AttentionStep(ctypes.Structure):
    """One layer of a packed step, as the library takes it.

    Attributes:
        lse: (tokens, heads) float32, or None.
        segments: (num_segments, 4) int64: first token in the packed row, tokens, first run, number of runs.
        runs: (n, 2) int64: first slot, length.
        group_stride: Between groups of 32 numbers of a query or result: 32 where they lie side by side.
        window: As ``Scoring.window``; 0: none.
        threads: At most.
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
        ("group_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class Linear(ctypes.Structure):
    """A linear layer as ``actorpp_linear`` takes it; ``bias`` may be None."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
    )


class Norm(ctypes.Structure):
    """A norm's weight (hidden_size,) and what is added to the mean of the squares."""

    _fields_ = (("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class Layer(ctypes.Structure):
    """A decoder layer of Llama's form: what is the same in all steps.

    Attributes:
        project: To the queries of all heads, then the keys, then the values.
        gated: Gate and up.
        key, value: Everything that is stored of the layer.
        width: Of a head.
        window: As ``Scoring.window``; 0: none.
    """

    _fields_ = (
        ("before_attention", Norm),
        ("before_mlp", Norm),
        ("project", Linear),
        ("output", Linear),
        ("gated", Linear),
        ("down", Linear),
        ("key", Side),
        ("value", Side),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    )


class Batch(ctypes.Structure):
    """A packed step: what is the same in all layers.

    Attributes:
        cos, sin: (rows, width), as ``actorpp_rotate`` takes them.
        slots: (rows,) int64, of the new keys and values.
        segments, runs: As in ``AttentionStep``.
        threads: At most.
    """

    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


@cache
def library() -> Any:
    """The library, ready to compute on the best unit of the CPU; None where it was not compiled or there is none.

    Raises:
        ConfigError: It was compiled from other sources than these.
    """
    spec = find_spec(LIBRARY)
    if spec is None or spec.origin is None:
        return None
    loaded = opened(spec.origin)
    return loaded if loaded.actorpp_start(TILES) != NOTHING else None


def opened(path: str) -> Any:
    """The library at ``path``, which does not compute yet. Raises ConfigError as ``library``."""
    loaded = ctypes.CDLL(path)
    interface = getattr(loaded, "actorpp_interface", None)
    if interface is None or interface() != INTERFACE:
        raise ConfigError(f"{path} is not of this version: install again (pip install .)")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.actorpp_rms_norm.argtypes = (*[pointer] * 3, *[number] * 2, ctypes.c_float)
    loaded.actorpp_rotate.argtypes = (*[pointer] * 3, *[number] * 4)
    loaded.actorpp_file.argtypes = (*[pointer] * 3, *[number] * 7)
    loaded.actorpp_likeliest.argtypes = (*[pointer] * 2, *[number] * 2)
    loaded.actorpp_layers.argtypes = (pointer, number, *[pointer] * 4)
    loaded.actorpp_linear.argtypes = (*[pointer] * 4, number, *[ctypes.c_int32] * 2)
    return loaded


def unit() -> int:
    """What the library computes products on."""
    return NOTHING if library() is None else ctypes.c_int.in_dll(library(), "actorpp_unit").value


def attend(step: AttentionStep) -> None:
    """Compute ``step``, without Python's lock. Raises MemoryError."""
    if library().actorpp_attend(ctypes.byref(step)):
        raise MemoryError("no memory for the attention of a step")


def compute_layers(layers: ctypes.Array[Layer], batch: Batch, hidden: int, scratch: int, out: int) -> None:
    """Compute layers in turn, without Python's lock, from and to the memory at these addresses. Raises MemoryError."""
    first, count, step = ctypes.addressof(layers), len(layers), ctypes.addressof(batch)
    if library().actorpp_layers(first, count, step, hidden, scratch, out):
        raise MemoryError("no memory for the attention of a step")

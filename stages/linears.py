"""Linear layers in bfloat16 on CPUs, with weights laid out once for the kernels that read them.

A plain ``nn.Linear`` hands its weight over row by row, and oneDNN lays it out anew in each call or reads it badly: for
the few rows of a decode step that is most of the time. On CPUs that the library knows our own kernel computes what it
can, elsewhere oneDNN. float32 gains nothing from it [``python -m tests.bench.steps``] and stays as it is. Nothing here
knows transformers.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from actorpp.stages import native

ROWS = 512
"""Rows for which oneDNN's layout is chosen; it was as fast as any for fewer."""

PANEL = 32
"""Output features of a panel of tiles, and input features of a tile; two tiles of half as many outputs are a panel."""

DEEPEST = {native.VECTORS: 4096, native.TILES: 2048}
"""By unit: input features up to which our kernel is as fast as oneDNN's also for hundreds of rows. On tiles it is
slower from 4096 on; on vectors by a tenth for 14336."""


class PackedLinear(nn.Module, ABC):
    """Computes what an ``nn.Linear`` does, with its weight in a kernel's layout alone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()

    @abstractmethod
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""

    @abstractmethod
    def plus(self, hidden_states: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """The product plus ``summand`` (..., out_features), rounded once."""

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """(out_features, in_features), copied out of the layout."""


class OneDnnLinear(PackedLinear):
    """oneDNN's kernel and layout, for any shape."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See ``PackedLinear``."""
        return self._product(hidden_states, "none")

    def silu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """SiLU of the product, before it is rounded."""
        return self._product(hidden_states, "swish")

    def times(self, hidden_states: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product times ``factor`` (..., out_features), rounded once."""
        return self._product_with(hidden_states, factor, "mul")

    def plus(self, hidden_states: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """See ``PackedLinear``."""
        return self._product_with(hidden_states, summand, "add")

    def dense(self) -> torch.Tensor:
        """See ``PackedLinear``."""
        weight: torch.Tensor = self._packed.to_dense()
        return weight

    def _product(self, hidden_states: torch.Tensor, then: str) -> torch.Tensor:
        operation = torch.ops.mkldnn._linear_pointwise.default
        out: torch.Tensor = operation(hidden_states, self._packed, self.bias, then, [], "")
        return out

    def _product_with(self, hidden_states: torch.Tensor, other: torch.Tensor, then: str) -> torch.Tensor:
        operation = torch.ops.mkldnn._linear_pointwise.binary
        out: torch.Tensor = operation(hidden_states, other, self._packed, self.bias, then)
        return out


class TiledLinear(PackedLinear):
    """Our kernel (``native_linear.c``), for features in multiples of 32. Vectors take weights as tiles do.

    What it gives for a row depends neither on how many others there are nor on the number of threads.

    Attributes:
        described: What the library takes it by.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        tiles = weight.detach().view(-1, 2, PANEL // 2, self.in_features // PANEL, PANEL // 2, 2)
        self._tiles = tiles.permute(0, 3, 1, 4, 2, 5).contiguous()
        self.described = native.Linear(
            weight=self._tiles.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            in_features=self.in_features,
            out_features=self.out_features,
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See ``PackedLinear``."""
        return self._product(hidden_states, None, gated=False)

    def plus(self, hidden_states: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """See ``PackedLinear``."""
        return self._product(hidden_states, summand, gated=False)

    def gated(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., out_features / 2): of each 32 outputs, SiLU of the first 16 times the last 16, rounded once."""
        return self._product(hidden_states, None, gated=True)

    def dense(self) -> torch.Tensor:
        """See ``PackedLinear``."""
        return self._tiles.permute(0, 2, 4, 1, 3, 5).reshape(self.out_features, self.in_features)

    def _product(self, hidden_states: torch.Tensor, summand: torch.Tensor | None, *, gated: bool) -> torch.Tensor:
        features = self.out_features // 2 if gated else self.out_features
        out = torch.empty(*hidden_states.shape[:-1], features, dtype=torch.bfloat16)
        rows = as_rows(hidden_states, (*out.shape[:-1], self.in_features))
        added = None if summand is None else as_rows(summand, out.shape)
        native.library().actorpp_linear(
            ctypes.addressof(self.described),
            rows.data_ptr(),
            None if added is None else added.data_ptr(),
            out.data_ptr(),
            rows.numel() // self.in_features,
            gated,
            torch.get_num_threads(),
        )
        return out


def as_rows(values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``values`` as the kernel reads them, if they are what it takes for granted."""
    if values.shape != torch.Size(shape) or values.dtype != torch.bfloat16:
        raise ValueError(f"{values.dtype} of shape {tuple(values.shape)} instead of bfloat16 of {tuple(shape)}")
    return values.contiguous()


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """The layer (out_features, in_features) in the layout of the fastest kernel that can compute it."""
    fits = weight.shape[1] <= DEEPEST.get(native.unit(), 0) and not any(features % PANEL for features in weight.shape)
    return TiledLinear(weight, bias) if fits else OneDnnLinear(weight, bias)


def join(parts: Sequence[PackedLinear]) -> PackedLinear:
    """One layer whose outputs are those of all parts, one behind the other; the parts stay as they are."""
    weight, bias = torch.cat([part.dense() for part in parts]), _biases(parts)
    return packed(weight, torch.cat(bias) if bias else None)


class OneDnnGate(NamedTuple):
    """Gate and up in a product each."""

    gate: OneDnnLinear
    up: OneDnnLinear

    def gated(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """SiLU of what ``gate`` gives, times what ``up`` gives."""
        return self.up.times(hidden_states, self.gate.silu(hidden_states))


def gate_with(gate: PackedLinear, up: PackedLinear) -> TiledLinear | OneDnnGate:
    """What gives SiLU of ``gate``'s product times ``up``'s, in one product if it can; both stay as they are."""
    if isinstance(gate, OneDnnLinear) and isinstance(up, OneDnnLinear):
        return OneDnnGate(gate, up)
    weight, bias = _in_turn([gate.dense(), up.dense()]), _biases([gate, up])
    return TiledLinear(weight, _in_turn(bias) if bias else None)


def _in_turn(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights or biases as one: 16 outputs of each part, then the next 16 of each."""
    return torch.stack([part.view(-1, PANEL // 2, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)


def _biases(parts: Sequence[PackedLinear]) -> list[torch.Tensor]:
    """Of each part; none if no part has one."""
    if all(part.bias is None for part in parts):
        return []
    return [torch.zeros(part.out_features).bfloat16() if part.bias is None else part.bias for part in parts]


def pack_linears(model: nn.Module) -> int:
    """Replace the model's plain linear layers, in place, where that is faster: bfloat16 on a CPU with such kernels.

    Subclasses and layers with hooks or parametrisations are left alone: they do more than a product.

    Returns:
        How many were replaced.
    """
    if not (torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return 0
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_plain(child)
    ]
    for parent, name in found:  # each layer's own weight is gone before the next is laid out
        linear: Any = parent.get_submodule(name)
        setattr(parent, name, packed(linear.weight, linear.bias))
    return len(found)


def _is_plain(linear: nn.Linear) -> bool:
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks)
    weight = linear.weight
    return not any(hooks) and weight.device.type == "cpu" and weight.dtype == torch.bfloat16

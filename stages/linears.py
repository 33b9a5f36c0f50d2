"""Linear layers with weights laid out once for oneDNN's bfloat16 kernels.

A plain ``nn.Linear`` hands its weight over row by row, and oneDNN lays it out anew in each call or reads it badly: for
the few rows of a decode step that is most of the time. float32 gains nothing from it [``python -m tests.bench.steps``]
and stays as it is. Nothing here knows transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

ROWS = 512
"""Rows for which the layout is chosen; it was as fast as any for fewer."""


class PackedLinear(nn.Module):
    """Computes what ``linear`` did. Its weight is kept in oneDNN's own layout alone."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        return self._product(hidden_states, "none")

    def silu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """SiLU of the product, before it is rounded."""
        return self._product(hidden_states, "swish")

    def times(self, hidden_states: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product times ``factor`` (..., out_features), rounded once."""
        return self._product_with(hidden_states, factor, "mul")

    def plus(self, hidden_states: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """The product plus ``summand`` (..., out_features), rounded once."""
        return self._product_with(hidden_states, summand, "add")

    def _product(self, hidden_states: torch.Tensor, then: str) -> torch.Tensor:
        operation = torch.ops.mkldnn._linear_pointwise.default
        out: torch.Tensor = operation(hidden_states, self._packed, self.bias, then, [], "")
        return out

    def _product_with(self, hidden_states: torch.Tensor, other: torch.Tensor, then: str) -> torch.Tensor:
        operation = torch.ops.mkldnn._linear_pointwise.binary
        out: torch.Tensor = operation(hidden_states, other, self._packed, self.bias, then)
        return out


def join(parts: Sequence[PackedLinear]) -> PackedLinear:
    """One layer whose outputs are those of all parts, one behind the other; the parts stay as they are."""
    weight = torch.cat([part._packed.to_dense() for part in parts])
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        linear.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return PackedLinear(linear)


def pack_linears(model: nn.Module) -> int:
    """Replace the model's plain linear layers, in place, where that is faster: bfloat16 on a CPU with such kernels.

    Subclasses and layers with hooks or parametrisations are left alone: they do more than a product.

    Returns:
        How many were replaced.
    """
    if not (torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_plain(child)
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)


def _is_plain(linear: nn.Linear) -> bool:
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks)
    weight = linear.weight
    return not any(hooks) and weight.device.type == "cpu" and weight.dtype == torch.bfloat16

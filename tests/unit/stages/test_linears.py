"""Weights laid out for oneDNN: the same products, and only where nothing else is asked of the layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from actorpp.stages.linears import PackedLinear, pack_linears
from actorpp.stages.loader import PassThrough
from tests.exactness.chain import Chain
from tests.exactness.tiny import save_llama

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 kernels"
)


class Special(nn.Linear):
    """Does more than a product, for all that is known."""


def _linear(dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 40, bias=bias, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layer_computes_the_product(rows: int, bias: bool) -> None:
    linear = _linear(bias=bias)
    hidden = torch.randn(1, rows, 96).bfloat16()
    exact = hidden.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0.0)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(hidden).double(), exact, rtol=2**-8, atol=2e-3)


def test_only_plain_bfloat16_layers_are_replaced() -> None:
    hooked = _linear()
    hooked.register_forward_hook(lambda module, args, out: out)
    special = Special(96, 40, dtype=torch.bfloat16)
    model = nn.ModuleDict({"plain": _linear(), "hooked": hooked, "special": special, "wide": _linear(torch.float32)})
    assert pack_linears(model) == 1
    assert [name for name, child in model.items() if isinstance(child, PackedLinear)] == ["plain"]


def test_a_stage_keeps_one_copy_of_its_weights(tmp_path: Path) -> None:
    """A tied head on the last stage is laid out, and the embedding, which only it needed, is gone."""
    chain = Chain(save_llama(tmp_path, tied=True), 2, dtype="bfloat16")
    first, last = (host.model for host in chain.hosts)
    assert isinstance(last.lm_head, PackedLinear)
    assert isinstance(last.model.embed_tokens, PassThrough)
    assert not isinstance(first.model.embed_tokens, PassThrough)
    for model in (first, last):
        assert not [name for name, parameter in model.named_parameters() if parameter.dim() > 1 and "embed" not in name]


def test_float32_is_left_alone(tmp_path: Path) -> None:
    chain = Chain(save_llama(tmp_path), 1, dtype="float32")
    assert not any(isinstance(module, PackedLinear) for module in chain.hosts[0].model.modules())

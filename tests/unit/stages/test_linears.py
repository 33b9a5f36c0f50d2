"""Weights laid out for a kernel: the same products, and only where nothing else is asked of the layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from actorpp.stages import native
from actorpp.stages.linears import OneDnnLinear, PackedLinear, TiledLinear, gate_with, join, pack_linears, packed
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
        torch.testing.assert_close(packed(linear.weight, linear.bias)(hidden).double(), exact, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize(
    ("unit", "deepest"),
    [(native.NOTHING, 0), (native.VECTORS, 4096), (native.TILES, 2048)],
    ids=["none", "vectors", "tiles"],
)
def test_the_layout_follows_the_shape_and_the_unit(monkeypatch: pytest.MonkeyPatch, unit: int, deepest: int) -> None:
    monkeypatch.setattr(native, "unit", lambda: unit)
    for out_features, in_features in [(64, 96), (32, 2048), (32, 2080), (32, 4096), (32, 4128)]:
        layer = packed(torch.ones(out_features, in_features).bfloat16(), None)
        assert isinstance(layer, TiledLinear if in_features <= deepest else OneDnnLinear)
    for shape in [(40, 96), (64, 100)]:
        assert isinstance(packed(torch.ones(shape).bfloat16(), None), OneDnnLinear)


@pytest.mark.parametrize("layout", [TiledLinear, OneDnnLinear])
def test_weights_are_read_back_out_of_a_layout(layout: type[PackedLinear]) -> None:
    weight = torch.arange(128 * 96).view(128, 96).bfloat16()
    assert torch.equal(layout(weight, None).dense(), weight)


@pytest.mark.parametrize("library", [True, False])
def test_joined_layers_compute_what_their_parts_do(monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    """Also where only one has a bias."""
    if not library:
        monkeypatch.setattr(native, "library", lambda: None)
    torch.manual_seed(1)
    bias = torch.randn(64).bfloat16()
    parts = [packed(torch.randn(64, 96).bfloat16(), own) for own in (None, bias)]
    hidden = torch.randn(5, 96).bfloat16()
    with torch.inference_mode():
        gate, up = (part(hidden).double() for part in parts)
        assert torch.equal(join(parts)(hidden).double(), torch.cat((gate, up), dim=-1))
        exact = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(gate_with(*parts).gated(hidden).double(), exact, rtol=2**-5, atol=0.05)


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

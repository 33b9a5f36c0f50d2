"""Linear layers of the library: no further from exact products than oneDNN's, and a row is the same in any company."""

from __future__ import annotations

import pytest
import torch

from actorpp.stages.linears import OneDnnLinear, TiledLinear, gate_with

pytestmark = pytest.mark.usefixtures("unit")

SHAPES = [(32, 32), (576, 96), (1056, 64)]
"""in_features, out_features."""


def _layer(in_features: int, out_features: int, *, bias: bool = True) -> TiledLinear:
    weight = torch.randn(out_features, in_features).div(in_features**0.5).bfloat16()
    return TiledLinear(weight, torch.randn(out_features).bfloat16() if bias else None)


def _exact(layer: TiledLinear, hidden: torch.Tensor) -> torch.Tensor:
    product = hidden.double() @ layer.dense().double().T
    return product if layer.bias is None else product + layer.bias.double()


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_products_err_no_more_than_onednns(in_features: int, out_features: int, bias: bool) -> None:
    torch.manual_seed(in_features)
    ours = _layer(in_features, out_features, bias=bias)
    theirs = OneDnnLinear(ours.dense(), ours.bias)
    for rows in [*range(1, 34), 48, 49, 64, 65, 500, 1111]:
        hidden = torch.randn(1, rows, in_features).bfloat16()
        summand = torch.randn(1, rows, out_features).bfloat16()
        exact = _exact(ours, hidden)
        assert _error(ours(hidden), exact) <= 1.002 * _error(theirs(hidden), exact)
        exact += summand.double()
        assert _error(ours.plus(hidden, summand), exact) <= 1.002 * _error(theirs.plus(hidden, summand), exact)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_gate_and_up_in_one_product_err_less_than_in_two(in_features: int, out_features: int, bias: bool) -> None:
    torch.manual_seed(in_features)
    parts = [_layer(in_features, out_features, bias=bias) for _ in range(2)]
    ours = gate_with(*parts).gated
    theirs = gate_with(*(OneDnnLinear(part.dense(), part.bias) for part in parts)).gated
    for rows in [*range(1, 34), 500]:
        hidden = torch.randn(rows, in_features).bfloat16()
        gate, up = (_exact(part, hidden) for part in parts)
        exact = torch.nn.functional.silu(gate) * up
        assert _error(ours(hidden), exact) < _error(theirs(hidden), exact)


@pytest.mark.parametrize("extreme", [1e-3, 30.0, 1000.0])
def test_gates_far_from_zero(extreme: float) -> None:
    gate, up = (TiledLinear(torch.eye(32).bfloat16(), None) for _ in range(2))
    hidden = torch.linspace(-extreme, extreme, 32 * 7).view(7, 32).bfloat16()
    exact = torch.nn.functional.silu(hidden.double()) * hidden.double()
    torch.testing.assert_close(gate_with(gate, up).gated(hidden).double(), exact, rtol=2**-8, atol=1e-30)


def test_a_row_is_the_same_in_any_company() -> None:
    torch.manual_seed(0)
    layer = _layer(1056, 64)
    hidden, summand = torch.randn(1111, 1056).bfloat16(), torch.randn(1111, 64).bfloat16()
    whole, added, product = layer(hidden), layer.plus(hidden, summand), layer.gated(hidden)
    for rows in [1, 2, 8, 15, 16, 17, 32, 33, 100]:
        for first in (0, 7, 1111 - rows):
            part = slice(first, first + rows)
            assert torch.equal(layer(hidden[part]), whole[part])
            assert torch.equal(layer.plus(hidden[part], summand[part]), added[part])
            assert torch.equal(layer.gated(hidden[part]), product[part])


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_no_bit(threads: int) -> None:
    """Of a product that is large enough for more than one."""
    torch.manual_seed(0)
    layer, hidden = _layer(1056, 992), torch.randn(70, 1056).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = layer(hidden)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(layer(hidden), alone)
    finally:
        torch.set_num_threads(before)


def test_what_is_not_finite_stays_in_its_row() -> None:
    torch.manual_seed(0)
    layer, hidden = _layer(64, 64), torch.randn(40, 64).bfloat16()
    finite = layer(hidden)
    hidden[3, 7], hidden[39, 0] = torch.nan, torch.inf
    found = layer(hidden)
    assert found[3].isnan().all()
    assert not found[39].isfinite().any()
    assert torch.equal(found[4:39], finite[4:39])


def test_inputs_that_do_not_lie_side_by_side_and_empty_ones() -> None:
    torch.manual_seed(0)
    layer, wide, summand = _layer(64, 32), torch.randn(64, 2, 9).bfloat16(), torch.randn(32, 9, 2).bfloat16()
    turned, added = wide.permute(2, 1, 0), summand.permute(1, 2, 0)
    assert torch.equal(layer(turned), layer(turned.contiguous()))
    assert torch.equal(layer.plus(turned, added), layer.plus(turned.contiguous(), added.contiguous()))
    assert layer(torch.empty(1, 0, 64).bfloat16()).shape == (1, 0, 32)


@pytest.mark.parametrize("hidden", [torch.zeros(3, 63).bfloat16(), torch.zeros(3, 64)])
def test_what_the_kernel_does_not_read_is_refused(hidden: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="instead of bfloat16"):
        _layer(64, 32)(hidden)
    with pytest.raises(ValueError, match="instead of bfloat16"):
        _layer(64, 32).plus(torch.zeros(3, 64).bfloat16(), torch.zeros(1, 32).bfloat16())

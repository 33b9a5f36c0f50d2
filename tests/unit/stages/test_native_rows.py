"""The library's functions between matrix products, beside torch's own operations."""

from __future__ import annotations

import pytest
import torch

from actorpp.stages import native
from actorpp.stages.fused import Angles, rms_norm, rotate
from actorpp.stages.kv import KVArena, LayerShape
from actorpp.stages.messages import SamplingParams
from actorpp.stages.sampler import SampleRow, processors, sample

pytestmark = pytest.mark.skipif(not native.library(), reason="no x86 CPU with AMX or AVX512-BF16, or no C compiler")


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm_is_torchs(monkeypatch: pytest.MonkeyPatch, rows: int, scale: float) -> None:
    torch.manual_seed(rows)
    hidden, weight = (torch.randn(1, rows, 96) * scale).bfloat16(), torch.randn(96).bfloat16()
    ours = rms_norm(hidden, weight, 1e-5)
    monkeypatch.setattr(native, "library", lambda: None)
    theirs = rms_norm(hidden, weight, 1e-5)
    assert (ours != theirs).float().mean() < 0.01  # the mean's last bit, at the border between two roundings
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)


def test_what_is_not_finite_stays_in_its_row() -> None:
    hidden = torch.ones(1, 4, 64).bfloat16()
    hidden[0, 1, 5], hidden[0, 2, 5] = torch.nan, torch.inf
    normed = rms_norm(hidden, torch.ones(64).bfloat16(), 1e-5)
    assert normed[0, 1].isnan().all()
    assert normed[0, 2, 5].isnan()
    assert torch.equal(normed[0, 0], torch.ones(64).bfloat16())
    assert torch.equal(normed[0, 3], normed[0, 0])


@pytest.mark.parametrize("width", [32, 64, 128])
def test_heads_are_rotated_and_the_others_left(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    torch.manual_seed(width)
    heads = torch.randn(5, 7, width).bfloat16()
    angles = torch.rand(1, 5, width // 2).mul(6).repeat(1, 1, 2)
    cos, sin = Angles().of((angles.cos().bfloat16(), angles.sin().bfloat16()))
    ours, theirs = heads.clone(), heads.clone()
    rotate(ours, 4, cos, sin)
    monkeypatch.setattr(native, "library", lambda: None)
    rotate(theirs, 4, cos, sin)
    exact = heads[:, :4].double() * cos[:, None] + heads[:, :4].double().roll(width // 2, -1) * sin[:, None]
    torch.testing.assert_close(ours[:, :4].double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(theirs, ours, rtol=2**-6, atol=2**-6)
    assert torch.equal(ours[:, 4:], heads[:, 4:])


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100, 49152])
def test_the_likeliest_id_is_torchs(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The first of several, as many logits are the same in bfloat16; NaN and infinities where they come."""
    torch.manual_seed(width)
    logits = torch.randn(30, width).bfloat16()
    logits[1], logits[2], logits[3] = -torch.inf, -1.0 - logits[2].abs(), -torch.finfo(torch.bfloat16).max
    logits[4] = torch.tensor([-0.0, 0.0]).repeat(width)[:width]
    logits[5], logits[6] = torch.tensor([0.0, -0.0]).repeat(width)[:width], torch.inf
    for row, special in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf), start=7):
        logits[row, width // 2 :: 3] = special
    logits[11, width // 3], logits[11, -1] = torch.inf, -torch.nan
    rows = [SampleRow(SamplingParams(temperature=0), processors(SamplingParams(temperature=0), 1), 0)] * 30
    ours, broken = sample(logits, rows)
    monkeypatch.setattr(native, "library", lambda: None)
    theirs, found = sample(logits, rows)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, logits.float().argmax(dim=-1))
    assert torch.equal(broken, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_are_filed_where_they_belong(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    arenas = [KVArena({3: LayerShape(2, 24, 3, 40)}, 16, dtype, torch.device("cpu")) for _ in range(2)]
    slots = torch.tensor([5, 0, 77, 40])
    keys, values = torch.randn(4, 5, 24, dtype=dtype), torch.randn(3, 4, 40, dtype=dtype)
    for arena in arenas:
        arena.allocate(5)
        for page in range(5):
            for view in arena.page(page):
                view.zero_()
    arenas[0].write(3, slots, keys.transpose(0, 1)[1:3], values)
    monkeypatch.setattr(native, "library", lambda: None)
    arenas[1].write(3, slots, keys.transpose(0, 1)[1:3], values)
    for ours, theirs in zip(arenas[0].tensors(3), arenas[1].tensors(3), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.count_nonzero() == theirs.count_nonzero() > 0

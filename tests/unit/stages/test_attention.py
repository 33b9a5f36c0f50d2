"""Backends against plain attention in double precision: values, log-sum-exp, runs, merging, refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from actorpp.errors import UnsupportedModelError
from actorpp.stages import backends
from actorpp.stages.attention import packed_attention
from actorpp.stages.backends import (
    BLOCK_KEYS,
    BlockBackend,
    FlashBackend,
    Scoring,
    SdpaBackend,
    SegmentBackend,
    merge,
)
from actorpp.stages.history import GATHERED_KEYS, History
from actorpp.stages.packed import ProbeCache
from tests.support.packed_step import check_step, packed_step

HEADS, KV_HEADS, WIDTH = 6, 2, 16
SCALING = 0.3
PLAIN = Scoring(SCALING)
BACKENDS: list[SegmentBackend] = [FlashBackend(), SdpaBackend(), BlockBackend()]


def _tensors(n: int, total: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, n, WIDTH), (KV_HEADS, total, WIDTH), (KV_HEADS, total, WIDTH)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, keys, values


def _plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring = PLAIN
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in double precision over all keys at once."""
    n, total = query.shape[1], keys.shape[1]
    keys, values = (side.double().repeat_interleave(HEADS // KV_HEADS, 0) for side in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * SCALING
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    for row in range(n):
        own = total - n + row
        scores[:, row, own + 1 :] = -torch.inf
        if scoring.window is not None:
            scores[:, row, : max(0, own - scoring.window + 1)] = -torch.inf
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "total"), [(1, 1), (1, 300), (5, 5), (130, 130), (300, 701), (2, 129), (257, 258)])
@pytest.mark.parametrize(
    "scoring",
    [PLAIN, PLAIN._replace(softcap=0.5)] + [PLAIN._replace(window=window) for window in (1, 5, 128, 129, 300, 700)],
)
def test_output_and_log_sum_exp_are_right(backend: SegmentBackend, n: int, total: int, scoring: Scoring) -> None:
    query, keys, values = _tensors(n, total)
    history = History([(keys, values)])
    out, lse = backend.attend(query, history, scoring, with_lse=True)
    exact, exact_lse = _plain(query, keys, values, scoring)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)
    assert lse is not None
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-6)
    without, none = backend.attend(query, history, scoring)
    torch.testing.assert_close(without.double(), exact, rtol=0, atol=2e-6)
    assert none is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [[100, 200], [290, 301, 340], [1, 2, 399]])
@pytest.mark.parametrize("window", [None, 60, 310])
def test_history_in_several_runs_equals_one_run(backend: SegmentBackend, cuts: list[int], window: int | None) -> None:
    """Runs may end within the queries' own keys, too: those begin at 300. Windows reach across their borders."""
    query, keys, values = _tensors(100, 400)
    scoring = PLAIN._replace(window=window)
    whole, _ = backend.attend(query, History([(keys, values)]), scoring)
    edges = [0, *cuts, 400]
    runs = [(keys[:, lo:hi], values[:, lo:hi]) for lo, hi in pairwise(edges)]
    split, _ = backend.attend(query, History(runs), scoring)
    torch.testing.assert_close(split, whole, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stored_latents_are_expanded_piece_by_piece(backend: SegmentBackend) -> None:
    """What is stored is a third of the keys, and values are narrower than keys; no piece is longer than a block."""
    query, _, _ = _tensors(40, 40)
    latents = torch.randn(1, 5000, 5, generator=torch.Generator().manual_seed(3))
    weights = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(4)) / 3
    longest = 0

    def expand(stored: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal longest
        longest = max(longest, stored.shape[1])
        both = torch.cat((stored @ weights, rotary.expand(2, -1, -1)), dim=-1)
        return both[..., -WIDTH:], both[..., :7]

    runs = [(latents[:, lo:hi], latents[:, lo:hi, :2]) for lo, hi in ((0, 10), (10, 4970), (4970, 5000))]
    out, _ = backend.attend(query, History(runs, expand), PLAIN)
    assert longest <= BLOCK_KEYS
    exact, _ = _plain(query, *expand(latents, latents[..., :2]))  # the products of pieces may be rounded otherwise
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=2e-6)


def test_merge_joins_disjoint_keys() -> None:
    query, keys, values = _tensors(1, 90)
    exact, exact_lse = FlashBackend().attend(query, History([(keys, values)]), PLAIN, with_lse=True)
    parts = []
    for lo, hi in ((0, 20), (20, 21), (21, 90)):
        history = History([(keys[:, lo:hi], values[:, lo:hi])])
        out, lse = SdpaBackend().attend(query, history, PLAIN, with_lse=True)
        assert lse is not None
        parts.append((out, lse))
    out, lse = merge(parts)
    torch.testing.assert_close(out, exact, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_keeps_its_type(backend: SegmentBackend) -> None:
    query, keys, values = (tensor.bfloat16() for tensor in _tensors(40, 200))
    out, _ = backend.attend(query, History([(keys, values)]), PLAIN)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), _plain(query, keys, values)[0], rtol=0, atol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scoring", [PLAIN, PLAIN._replace(window=20), PLAIN._replace(softcap=0.5)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1), (40, 1), (7, 1)],
        [(33, 1), (50, 20), (GATHERED_KEYS + 1, 1), (12, 1), (3, 3), (GATHERED_KEYS, 1)],
        [(40, 1), (5, 5)],
    ],
)
def test_a_step_gives_each_segment_its_own_attention(
    backend: SegmentBackend, scoring: Scoring, lengths: list[tuple[int, int]]
) -> None:
    """Decode tokens with short histories, which may go in one call, stand among chunks and long histories."""
    query, kv = packed_step(lengths)
    check_step(backend, query, kv, scoring._replace(scaling=0.25), 2e-6)


def test_short_decodes_in_bfloat16_err_by_its_rounding_alone() -> None:
    lengths = [(33, 1), (50, 20), (GATHERED_KEYS, 1), (12, 1)]
    for scoring in (PLAIN, PLAIN._replace(window=20)):
        check_step(FlashBackend(), *packed_step(lengths, dtype=torch.bfloat16), scoring, 0.02)


def test_sixteen_short_requests_decode_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        return flash(*args, **kwargs)  # type: ignore[arg-type]

    flash = backends._flash
    monkeypatch.setattr(backends, "_flash", counted)
    query, kv = packed_step([(64 + 3 * index, 1) for index in range(16)])
    FlashBackend().attend_step(query, kv, PLAIN)
    assert calls == 1


@pytest.mark.parametrize("keyword", ["something_new", "local_attention"])
def test_keyword_that_would_be_left_out_is_refused_by_name(keyword: str) -> None:
    query, keys, values = (tensor[None] for tensor in _tensors(2, 2))
    cache = ProbeCache(2)
    cache.update(keys, values, 0)
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    common = {"scaling": SCALING, "packed": cache, "backend": FlashBackend(), "position_ids": torch.arange(2)}
    out, _ = packed_attention(module, query, keys, values, None, **common, **{keyword: None})  # type: ignore[arg-type]
    assert out.shape == (1, 2, HEADS, WIDTH)
    with pytest.raises(UnsupportedModelError, match=keyword):
        packed_attention(module, query, keys, values, None, **common, **{keyword: 4})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        packed_attention(module, query, keys, values, torch.zeros(1), **common)  # type: ignore[arg-type]
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="sight of later tokens"):
        packed_attention(module, query, keys, values, None, **common)  # type: ignore[arg-type]


def test_sink_takes_its_share_of_the_weights() -> None:
    """As one more key with a value of zero and a score of its own for each head."""
    query, keys, values = _tensors(6, 6)
    cache = ProbeCache(6)
    cache.update(keys[None], values[None], 0)
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    sinks = torch.linspace(-1, 2, HEADS)
    for backend in BACKENDS:
        out, _ = packed_attention(
            module,
            query[None],
            keys[None],
            values[None],
            None,
            scaling=SCALING,
            packed=cache,
            backend=backend,
            s_aux=sinks,
        )
        plain, lse = _plain(query, keys, values)
        share = torch.exp(lse) / (torch.exp(lse) + torch.exp(sinks.double())[:, None])
        torch.testing.assert_close(out[0].transpose(0, 1).double(), plain * share[..., None], rtol=0, atol=2e-6)

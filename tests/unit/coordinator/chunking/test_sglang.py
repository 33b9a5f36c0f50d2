"""The ``sglang`` policy gives the chunks that SGLang's users know, and falls back to fixed ones as it does."""

from __future__ import annotations

import pytest
import structlog.testing

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.fit import StageSample
from actorpp.coordinator.chunking.plan import plan_prompt
from actorpp.coordinator.chunking.policy import ChunkRequest
from actorpp.coordinator.chunking.profile import Profile, ProfileKey
from actorpp.coordinator.chunking.sglang import Quadratic, SglangChunks, fit_quadratic
from tests.unit.coordinator.chunking.support import context, model

FREE = 1 << 40
# fmt: off
GOLDEN = {  # of a prompt of 131072 tokens: initial size, smoothing factor, chunks
    "ds_v31": (12288, 0.65, [
        12288, 7552, 6528, 6016, 5760, 5504, 5376, 5248, 5184, 5056, 4992, 4992, 4928, 4864, 4864, 4800, 4800, 4736,
        4736, 4736, 4672, 4672, 4672, 4096,
    ]),
    "qwen235": (18432, 0.8, [
        18432, 9792, 8064, 7168, 6656, 6272, 6016, 5760, 5632, 5440, 5376, 5248, 5120, 5056, 4992, 4928, 4864, 4800,
        4800, 4736, 1920,
    ]),
    "sigma_0": (12288, 0.0, [12288] * 10 + [8192]),
    "sigma_0.5": (12288, 0.5, [
        12288, 8640, 7808, 7360, 7104, 6976, 6848, 6784, 6720, 6656, 6592, 6592, 6528, 6528, 6464, 6464, 6464, 6400,
        1856,
    ]),
    "sigma_1.0": (12288, 1.0, [12288, 5056, 3904, 3264] + [3072] * 34 + [2112]),
}
# fmt: on


def policy(size: int, factor: float, latency: Quadratic | None, **limits: int) -> SglangChunks:
    limits = {"page_size": 1, "context_length": FREE, "max_prefill_tokens": FREE} | limits
    return SglangChunks(size=size, latency=latency, smooth_factor=factor, **limits)


def chunks(policy: SglangChunks, total: int) -> list[int]:
    costs = CostModel((StageCost(0.0, 0.0, 1.0, 0.0),))
    return list(plan_prompt(policy, costs, total, window=1, max_chunk=FREE).chunks)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_sequences(name: str) -> None:
    size, factor, expected = GOLDEN[name]
    assert chunks(policy(size, factor, Quadratic(1.0, 0.0)), 131072) == expected


def test_only_the_ratio_of_the_coefficients_matters() -> None:
    of = [chunks(policy(4096, 0.75, Quadratic(s, 5000 * s, c)), 60000) for s, c in ((1.0, 0.0), (1e-9, 0.3))]
    assert of[0] == of[1]
    assert sum(of[0]) == 60000


def test_chunks_are_whole_pages_and_keep_to_the_limits() -> None:
    paged = chunks(policy(4096, 1.0, Quadratic(1.0, 0.0), page_size=256), 60000)
    assert all(chunk % 256 == 0 for chunk in paged[:-1])
    assert len(set(paged)) > 2
    limited = chunks(policy(4096, 0.75, Quadratic(1.0, 0.0), max_prefill_tokens=1500), 60000)
    assert max(limited[1:]) == 1472  # 1500 down to a multiple of 64
    # Near the context's end only context - history - 100 may be planned; where that is nothing, the size is fixed.
    near = policy(4096, 0.75, Quadratic(1.0, 0.0), context_length=9000)
    assert near.next_chunk(ChunkRequest(1, 9000), 8000, 1000, FREE) == 896
    assert near.next_chunk(ChunkRequest(1, 9000), 8900, 100, FREE) == 100


def test_a_small_budget_cuts_to_whole_pages() -> None:
    assert policy(512, 0.75, None, page_size=16).next_chunk(ChunkRequest(1, 5000), 0, 5000, 100) == 96


def test_the_fit_finds_the_coefficients() -> None:
    lengths = range(500, 6000, 500)
    fit = fit_quadratic(list(lengths), [3e-9 * n * n + 2e-5 * n + 0.01 for n in lengths])
    assert (fit.a, fit.b, fit.c) == pytest.approx((3e-9, 2e-5, 0.01))
    falling = fit_quadratic(list(lengths), [3e-9 * n * n - 1e-6 * n + 0.01 for n in lengths])
    assert falling.b == 0.0


KEY = ProfileKey("m", "float32", "cpu", "flash", 1, (1, 1))


def first_chunks(count: int, a: float) -> Profile:
    samples = [StageSample(0, 256 * n, False, (1e-3 * n + a * n * n, 1e-4 * n)) for n in range(1, count + 1)]
    return Profile(KEY, tuple(samples))


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        (None, "0 samples"),
        (first_chunks(7, 1e-4), "7 samples"),
        (first_chunks(12, -1e-5), "do not grow quadratically"),
        (first_chunks(12, 0.0), "do not grow quadratically"),
    ],
)
def test_without_a_usable_profile_chunks_have_one_size_and_that_is_said(profile: Profile | None, why: str) -> None:
    with structlog.testing.capture_logs() as logs:
        made = SglangChunks.of(context(model(), chunk_size=1024, profile=profile))
    assert chunks(made, 3000) == [1024, 1024, 952]
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert why in logs[0]["reason"]


def test_the_slowest_stages_first_chunks_are_fitted() -> None:
    made = SglangChunks.of(context(model(), chunk_size=1024, profile=first_chunks(8, 1e-4)))
    assert made.latency is not None
    assert made.latency.a == pytest.approx(1e-4 / 256**2)
    assert chunks(made, 8192)[0] == 1024
    assert chunks(made, 8192)[1] < 1024

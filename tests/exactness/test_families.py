"""Every supported model type as a tiny random model: split over 1, 2 and 4 stages, chunked, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actorpp.errors import UnsupportedModelError
from actorpp.stages.config import SUPPORTED_MODEL_TYPES
from tests.exactness.chain import Chain, recorded_logits
from tests.exactness.oracle import Answer, Case, ask
from tests.exactness.policy import TINY, TokenTally, check_bit_equal, check_logits
from tests.exactness.tiny import save_tiny

LENGTH, CHUNK, NEW_TOKENS, PAGE = 150, 37, 24, 16
ENDS = [36, 73, 110, 147, 149]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama with yarn and biases": ("llama", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3, heads wider than the hidden states": ("qwen3", {"head_dim": 32}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "granite with its four factors": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0, "attention_multiplier": 0.2},
    ),
    "olmo2": ("olmo2", {}),
    "phi3, fused projections": ("phi3", {}),
    "smollm3, layers without rope": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: save_tiny(root / str(index), model_type, seed=index, **options)
        for index, (name, (model_type, options)) in enumerate(CASES.items())
    }


@pytest.fixture(scope="module")
def ids(prompt_3000: list[int]) -> list[int]:
    return [token % 320 for token in prompt_3000[:LENGTH]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path], ids: list[int]) -> dict[str, Answer]:
    cases = [Case(name, str(path), "float32", ids, ENDS, NEW_TOKENS) for name, path in checkpoints.items()]
    return ask(cases, tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def tally() -> TokenTally:
    return TokenTally(TINY)


def test_every_supported_type_is_held_to_the_oracle() -> None:
    assert {model_type for model_type, _ in CASES.values()} == SUPPORTED_MODEL_TYPES


@pytest.mark.parametrize("name", CASES)
def test_split_model_answers_as_the_whole(
    name: str, checkpoints: dict[str, Path], ids: list[int], oracle: dict[str, Answer], tally: TokenTally
) -> None:
    answer = oracle[name]
    assert len(set(answer.tokens)) >= 8
    whole: torch.Tensor | None = None
    for stages in (1, 2, 4):
        chain = Chain(checkpoints[name], stages, page_size=PAGE)
        chain.admit(1, ids, range(1, 12))
        with recorded_logits() as rows:
            chain.prefill(1, LENGTH, CHUNK)
            tokens = chain.decode(1, LENGTH, NEW_TOKENS)
        logits = torch.stack(rows)
        whole = logits if whole is None else whole
        check_bit_equal(logits, whole)
        check_logits(logits[: len(ENDS)], answer.at_positions, TINY)
        check_logits(logits[len(ENDS) - 1 :], answer.logits, TINY)
        tally.check(f"{name}, {stages} stages", tokens, answer.tokens, answer.logits)
    assert not tally.ambiguous


def test_model_that_needs_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "mistral", sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="sliding-window"):
        Chain(path, 2)

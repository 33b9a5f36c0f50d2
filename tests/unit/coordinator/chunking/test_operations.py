"""Operation counts: of the default model by hand, and of what is special about other families."""

from __future__ import annotations

from typing import Any

import pytest

from actorpp.coordinator.chunking.operations import ATTENTION_RATIO, HISTORY_QUERIES, head_cost, layer_costs, prior

SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
}  # fmt: skip


def test_a_llama_by_hand() -> None:
    layer = layer_costs(SMOLLM2)[0]
    # q and o: 576 x 576 each, k and v: 576 x 192 each, three matrices of 576 x 1536.
    assert layer.b == 2 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    # Each of L x + x^2 / 2 pairs: 64 numbers of 9 heads, multiplied and added, for scores and for values.
    assert layer.a * 2 == ATTENTION_RATIO["cpu"] * 9 * 64 * 2 * 2
    assert layer.gamma == layer.a * 2 * HISTORY_QUERIES["cpu"]
    assert head_cost(SMOLLM2) == 2 * 576 * 49152


def test_a_stage_has_its_layers_and_the_last_one_the_head() -> None:
    costs = prior(SMOLLM2, [(0, 10), (10, 30)])
    first, last = costs.stages
    assert not costs.in_seconds
    assert (last.b, last.a, last.c, last.gamma) == pytest.approx(
        (2 * first.b, 2 * first.a, 2 * first.c, 2 * first.gamma)
    )
    assert first.head == 0 < last.head


def test_sliding_windows_make_attention_linear() -> None:
    layers = layer_costs(SMOLLM2 | {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 15})
    assert layers[0].a == 0 < layers[1].a
    assert layers[0].b == layers[1].b + 2 * layers[1].a * 512
    assert layer_costs(SMOLLM2 | {"sliding_window": 512, "use_sliding_window": False})[0].a > 0


def test_experts_count_as_far_as_a_token_meets_them() -> None:
    dense = layer_costs(SMOLLM2)[0].b
    experts = SMOLLM2 | {
        "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
    }  # fmt: skip
    layers = layer_costs(experts)
    assert layers[0].b == dense
    assert layers[1].b == dense + 2 * 3 * 576 * (3 * 1024 - 1536)


def test_latent_attention() -> None:
    latent = SMOLLM2 | {
        "kv_lora_rank": 128, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64,
    }  # fmt: skip
    layer = layer_costs(latent)[0]
    projections = 576 * 9 * 64 + 576 * (128 + 16) + 128 * 9 * (48 + 64) + 9 * 64 * 576
    assert layer.b == 2 * (projections + 3 * 576 * 1536)
    assert layer.a == ATTENTION_RATIO["cpu"] * 9 * 128


def test_a_config_that_counts_otherwise_is_counted_as_a_llama() -> None:
    odd = SMOLLM2 | {"intermediate_size": [1536, 3072], "num_key_value_heads": None, "head_dim": None}
    (layer, *_) = layer_costs(odd)
    assert layer.b == 2 * (4 * 576 * 576 + 3 * 576 * 4 * 576)

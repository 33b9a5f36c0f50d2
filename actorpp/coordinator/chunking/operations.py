"""What a step costs by the model's own operation counts, from its config.json: before anything was measured.

Counts are of multiplications and additions, with two rates where the device has two. Norms, activations and the
embedding's look-up are left out: they are small beside the matrix products. Sliding windows, experts, latent attention
and the first dense layers of expert models are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorpp.coordinator.chunking.cost import CostModel, StageCost

# How much slower attention's operations are than the linear layers'. On CPUs: one core in bf16 did 490 GFLOP/s of large
# matrix products and 230 of blocked attention.
ATTENTION_RATIO = {"cpu": 2.0, "cuda": 1.5}
# The fixed cost of a step, in tokens' worth of linear layers: reading the weights takes as long as computing so many.
STEP_TOKENS = {"cpu": 64.0, "cuda": 256.0}
# What a step pays for each token of history, in queries' worth of attention to it: reading its key and value, and on
# CPUs laying them out for the tile unit. On one core in bf16 it was 20.
HISTORY_QUERIES = {"cpu": 20.0, "cuda": 8.0}


def layer_costs(config: dict[str, Any], device_type: str = "cpu") -> list[StageCost]:
    """Operations of each decoder layer, ``c`` left out.

    Args:
        config: The model's config.json; what it lacks is taken as in a llama.
        device_type: ``cpu`` or ``cuda``.
    """
    hidden = _number(config, "hidden_size", 1)
    heads = _number(config, "num_attention_heads", 1)
    kv_heads = _number(config, "num_key_value_heads", heads)
    head_dim = _number(config, "head_dim", max(1, hidden // heads))
    if latent := _number(config, "kv_lora_rank", 0):  # MLA: narrow projections, then heads of two parts
        rope, nope = _number(config, "qk_rope_head_dim", 0), _number(config, "qk_nope_head_dim", head_dim)
        value = _number(config, "v_head_dim", head_dim)
        q_rank = _number(config, "q_lora_rank", 0)
        queries = heads * (nope + rope)
        query = hidden * q_rank + q_rank * queries if q_rank else hidden * queries
        keys = hidden * (latent + rope) + latent * heads * (nope + value)
        projections = query + keys + heads * value * hidden
        attended = heads * (nope + rope + value)
    else:
        projections = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
        attended = 2 * heads * head_dim
    ratio = ATTENTION_RATIO[device_type]
    costs = []
    for layer in range(_number(config, "num_hidden_layers", 1)):
        b = 2.0 * (projections + _mlp(config, hidden, layer))
        # A chunk attends to L x + x^2 / 2 pairs of tokens, (2 L x + x^2) / 2, each for two operations a number.
        a = ratio * attended
        if window := _window(config, layer):
            costs.append(StageCost(c=0.0, gamma=0.0, b=b + 2 * a * window, a=0.0))
        else:
            costs.append(StageCost(c=0.0, gamma=2 * a * HISTORY_QUERIES[device_type], b=b, a=a))
    return costs


def head_cost(config: dict[str, Any]) -> float:
    """Operations of one row of logits."""
    return 2.0 * _number(config, "hidden_size", 1) * _number(config, "vocab_size", 1)


def prior(config: dict[str, Any], ranges: Sequence[tuple[int, int]], device_type: str = "cpu") -> CostModel:
    """Costs of each stage, in operations.

    Args:
        ranges: Layers (lo, hi) of each stage.
    """
    layers = layer_costs(config, device_type)
    stages = []
    for stage, (lo, hi) in enumerate(ranges):
        b = sum(layer.b for layer in layers[lo:hi])
        last = stage == len(ranges) - 1
        stages.append(
            StageCost(
                c=STEP_TOKENS[device_type] * b,
                gamma=sum(layer.gamma for layer in layers[lo:hi]),
                b=b,
                a=sum(layer.a for layer in layers[lo:hi]),
                head=STEP_TOKENS[device_type] * head_cost(config) if last else 0.0,
            )
        )
    return CostModel(tuple(stages), in_seconds=False)


def _mlp(config: dict[str, Any], hidden: int, layer: int) -> float:
    """Multiplications of one token in a layer's MLP, or in the experts that it is sent to."""
    inner = _number(config, "intermediate_size", 4 * hidden)
    matrices = 2 if config.get("model_type") in ("gpt_neox", "starcoder2") else 3
    experts = _number(config, "num_experts_per_tok", 0)
    if not experts or layer < _number(config, "first_k_dense_replace", 0):
        return matrices * hidden * inner
    inner = _number(config, "moe_intermediate_size", inner)
    return 3 * hidden * inner * (experts + _number(config, "n_shared_experts", 0))


def _window(config: dict[str, Any], layer: int) -> int | None:
    """The sliding window of a layer, if it has one."""
    window = _number(config, "sliding_window", 0)
    types = config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return None
    if isinstance(types, list) and layer < len(types) and types[layer] != "sliding_attention":
        return None
    return window


def _number(config: dict[str, Any], key: str, default: int) -> int:
    """A count of the config; the default where it lacks it, has null or 0, or has another form (one for each layer)."""
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else default

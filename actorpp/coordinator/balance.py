"""``--layer-partition auto``: the layers of each stage such that the slowest stage is as fast as it can be.

Layers cost what their operations do, as do a row of logits on the last stage and the embedding on the first; where a
profile of the model is saved, in whatever partition, it says what a row of logits costs beside layers. All stages are
taken as equally fast, and memory is not weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.operations import STEP_TOKENS, head_cost, layer_costs, prior
from actorpp.coordinator.chunking.profile import Profile
from actorpp.errors import ConfigError

REFERENCE_PROMPT = 8192  # tokens; a stage's time is that of a prompt of so many, or of the context if that is shorter


def auto_partition(
    config: dict[str, Any],
    stages: int,
    *,
    context_length: int,
    device_type: str = "cpu",
    profile: Profile | None = None,
) -> tuple[int, ...]:
    """Layers of each stage.

    Args:
        config: The model's config.json.
        profile: Of this model on this device, if one is saved.

    Raises:
        ConfigError: More stages than layers.
    """
    tokens = min(context_length, REFERENCE_PROMPT)
    layers = [cost.time(0, tokens) for cost in layer_costs(config, device_type)]
    first = float(tokens * int(config["hidden_size"]))  # a look-up writes each number once
    last = STEP_TOKENS[device_type] * head_cost(config)
    if profile is not None:
        last = _measured_head(config, device_type, layers, profile, tokens)
    return balance(layers, stages, first=first, last=last)


def _measured_head(
    config: dict[str, Any], device_type: str, layers: Sequence[float], profile: Profile, tokens: int
) -> float:
    """What a row of logits took, in the layers' unit: beside the layers of its own stage, whatever that one's speed."""
    borders = list(accumulate(profile.key.partition, initial=0))
    costs = CostLearner(prior(config, list(pairwise(borders)), device_type), profile.samples).typical
    last = costs.stages[-1]
    return sum(layers[borders[-2] :]) * last.head / last.time(0, tokens)


def balance(layers: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Split layers of these costs so that the largest stage is smallest, and then the others most alike.

    Args:
        first, last: What the first and the last stage compute beside their layers.

    Raises:
        ConfigError: More stages than layers.
    """
    count = len(layers)
    if stages > count:
        raise ConfigError(f"{stages} stages are more than the model's {count} layers", param="stages")
    sums = list(accumulate(layers, initial=0.0))

    def cost(stage: int, lo: int, hi: int) -> float:
        return sums[hi] - sums[lo] + (first if not stage else 0.0) + (last if stage == stages - 1 else 0.0)

    def best(limit: float, squares: bool) -> tuple[float, tuple[int, ...]]:
        """The partition with the smallest largest stage, or of those within the limit with the smallest squares."""
        found: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by layers that are placed
        for stage in range(stages):
            reached: dict[int, tuple[float, tuple[int, ...]]] = {}
            for lo, (value, counts) in found.items():
                for hi in range(lo + 1, count - (stages - 1 - stage) + 1):
                    time = cost(stage, lo, hi)
                    if time > limit:
                        break
                    total = value + time * time if squares else max(value, time)
                    if hi not in reached or total < reached[hi][0]:
                        reached[hi] = (total, (*counts, hi - lo))
            found = reached
        return found[count]

    largest, _ = best(float("inf"), squares=False)
    return best(largest * (1 + 1e-12), squares=True)[1]

"""Which decoder layers each stage computes. No torch here; measured costs and memory are not weighed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from actorpp.errors import ConfigError


def partition(num_layers: int, stages: int, explicit: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """Split ``num_layers`` into ``stages`` consecutive ranges ``(lo, hi)``.

    Without an explicit list the split is even, and the remainder goes one each to the last stages, where it does not
    delay the first chunk's start (61 layers over 4 stages give 15, 15, 15, 16).

    Args:
        num_layers: Decoder layers of the model.
        stages: Stages of the pipeline.
        explicit: Layers of each stage, in order.

    Raises:
        ConfigError: More stages than layers, or a list of the wrong length or sum, or with an empty stage.
    """
    if stages < 1:
        raise ConfigError(f"the number of stages must be at least 1, got {stages}", param="stages")
    if stages > num_layers:
        raise ConfigError(f"{stages} stages are more than the model's {num_layers} layers", param="stages")
    if explicit is None:
        base, rest = divmod(num_layers, stages)
        counts = [base + (stage >= stages - rest) for stage in range(stages)]
    else:
        counts = list(explicit)
        shown = ",".join(map(str, counts))
        if len(counts) != stages:
            raise ConfigError(
                f"layer partition {shown} names {len(counts)} stages, but there are {stages}", param="layer_partition"
            )
        if min(counts) < 1:
            raise ConfigError(f"layer partition {shown} leaves a stage without layers", param="layer_partition")
        if sum(counts) != num_layers:
            raise ConfigError(
                f"layer partition {shown} sums to {sum(counts)}, but the model has {num_layers} layers",
                param="layer_partition",
            )
    return tuple(pairwise(accumulate(counts, initial=0)))

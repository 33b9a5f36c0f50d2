"""What one engine knows of its stages' times, and the chunk policies and predictions that follow from it.

It begins with the saved profile of the pipeline, or with the operation counts, and learns while the engine runs: the
scheduler tells ``costs`` what each step took. It measures nothing itself: ``actorpp.profiling`` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorpp.config import DEFAULT_SMOOTH_FACTOR, EngineConfig
from actorpp.coordinator.balance import auto_partition
from actorpp.coordinator.chunking.choose import make_policy
from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.operations import prior
from actorpp.coordinator.chunking.plan import ChunkPlan, plan_prompt
from actorpp.coordinator.chunking.policy import ChunkPolicy, PolicyContext
from actorpp.coordinator.chunking.profile import ProfileKey, any_partition, load_profile
from actorpp.errors import ContextLengthExceededError, InvalidRequestError
from actorpp.stages.backend_names import resolved
from actorpp.stages.checkpoint import Checkpoint
from actorpp.stages.config import choose_dtype


def choose_partition(config: EngineConfig, checkpoint: Checkpoint, context_length: int) -> tuple[int, ...] | None:
    """Layers of each stage as configured, computed for ``auto``; None is the even split.

    Raises:
        ConfigError: ``auto`` with more stages than layers.
    """
    if config.layer_partition != "auto":
        return config.layer_partition
    return auto_partition(
        checkpoint.config,
        config.stages,
        context_length=context_length,
        device_type=config.device_type,
        profile=any_partition(_key(config, checkpoint, ())),
    )


def _key(config: EngineConfig, checkpoint: Checkpoint, partition: tuple[int, ...]) -> ProfileKey:
    return ProfileKey.of(
        checkpoint.config,
        dtype=choose_dtype(config.dtype, checkpoint.dtype, config.device_type),
        device_type=config.device_type,
        attention=resolved(config.attention_backend, config.device_type),
        threads=config.threads(),
        partition=partition,
    )


class Planning:
    """Costs, policies and plans of one pipeline.

    Args:
        ranges: Layers (lo, hi) of each stage.

    Attributes:
        limits: The scheduler's limits for this model.
        key: What a profile of this pipeline is saved under.
        profile: The saved profile, or None; whoever measures one sets it.
        costs: Learns what a step costs; ``costs.model`` is the model at this moment.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, context_length: int, ranges: Sequence[tuple[int, int]]
    ) -> None:
        self.config = config
        self.context_length = context_length
        self.limits = config.scheduling_limits(context_length)
        self.max_chunk = min(self.limits.max_prefill_tokens, self.limits.max_num_batched_tokens)
        self.key = _key(config, checkpoint, tuple(hi - lo for lo, hi in ranges))
        self.profile = load_profile(self.key)
        counted = prior(checkpoint.config, ranges, config.device_type)
        self.costs = CostLearner(counted, () if self.profile is None else self.profile.samples)

    @property
    def needs_profile(self) -> bool:
        """Whether the engine's policy follows a profile, and there is none."""
        return self.limits.chunk_policy == "sglang" and self.profile is None

    def policy(
        self, name: str | None = None, *, chunk_size: int | None = None, smooth_factor: float | None = None
    ) -> ChunkPolicy:
        """A chunk policy for this pipeline; ``Scheduler.policy`` takes it, also between two requests.

        Args:
            name: As ``--chunk-policy``; by default the engine's.
            chunk_size: As ``--chunked-prefill-size``; by default the engine's.
            smooth_factor: As ``--dynamic-chunking-smooth-factor``; by default the engine's.

        Raises:
            ConfigError: There is no such policy.
        """
        if smooth_factor is None:
            smooth_factor = self.config.dynamic_chunking_smooth_factor
        context = PolicyContext(
            stages=self.config.stages,
            window=self.config.window,
            page_size=self.config.page_size,
            context_length=self.context_length,
            max_chunk=self.max_chunk,
            chunk_size=chunk_size or self.limits.chunked_prefill_size,
            smooth_factor=DEFAULT_SMOOTH_FACTOR if smooth_factor is None else smooth_factor,
            costs=self.costs,
            profile=self.profile,
        )
        return make_policy(name or self.limits.chunk_policy, context)

    def plan(self, policy: ChunkPolicy, prompt_tokens: int) -> ChunkPlan:
        """The chunks that ``policy`` gives a prompt that finds the pipeline empty, and its predicted times.

        Raises:
            ContextLengthExceededError: The context has no room for the prompt and one token.
            InvalidRequestError: Fewer than one token.
        """
        if prompt_tokens < 1:
            raise InvalidRequestError(f"a prompt has at least 1 token, not {prompt_tokens}", param="prompt_tokens")
        if prompt_tokens >= self.context_length:
            raise ContextLengthExceededError(
                f"the maximum context length is {self.context_length} tokens, but the prompt has {prompt_tokens}",
                param="prompt_tokens",
            )
        return plan_prompt(policy, self.costs, prompt_tokens, window=self.config.window, max_chunk=self.max_chunk)

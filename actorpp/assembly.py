"""What an engine is put together from: its stages' specs, where they run, its scheduler; all from the configuration.

It starts nothing: ``actorpp.engine`` does. The driver process imports no torch for it, unless the stages run in it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from actorpp.config import EngineConfig
from actorpp.coordinator.chunking.policy import ChunkPolicy
from actorpp.coordinator.ports import ProcessPorts
from actorpp.coordinator.scheduler import Scheduler
from actorpp.coordinator.scheduler_config import SchedulerConfig
from actorpp.coordinator.stage_group import Ports
from actorpp.errors import ConfigError
from actorpp.planning import Planning, choose_partition
from actorpp.runtime import ActorSystem
from actorpp.stages.backend_names import check_backend
from actorpp.stages.checkpoint import Checkpoint
from actorpp.stages.partition import partition
from actorpp.stages.spec import StageSpec
from actorpp.stages.wiring import WiringSpec
from actorpp.transport.process import run_dir


def choose_context_length(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Tokens of prompt and output of a request: as configured, by default all that the model has positions for.

    Raises:
        ConfigError: The model has fewer positions.
    """
    longest = checkpoint.max_position_embeddings
    wanted = config.context_length or longest
    if wanted > longest:
        raise ConfigError(
            f"--context-length {wanted} is more than the model's {longest} positions", param="context_length"
        )
    return wanted


def stage_specs(config: EngineConfig, checkpoint: Checkpoint, context_length: int) -> list[StageSpec]:
    """One for each stage, in order.

    Raises:
        ConfigError: The layers cannot be split as configured, or the device does not have the attention backend.
    """
    check_backend(config.attention_backend, config.device_type)
    ranges = partition(checkpoint.num_layers, config.stages, choose_partition(config, checkpoint, context_length))
    return [
        StageSpec(
            stage=stage,
            num_stages=config.stages,
            lo=lo,
            hi=hi,
            model_path=str(checkpoint.path),
            dtype=config.dtype,
            device=config.stage_device(stage),
            threads=config.threads(),
            page_size=config.page_size,
            context_length=context_length,
            max_running_requests=config.max_running_requests,
            load_format=config.load_format,
            async_depth=config.async_depth,
            seed=config.seed or 0,
            attention_backend=config.attention_backend,
            kv_tokens=config.kv_tokens,
            mem_fraction_static=config.memory_fraction(config.device_type),
            colocated=config.stages,
        )
        for stage, (lo, hi) in enumerate(ranges)
    ]


def stage_ports(
    config: EngineConfig,
    system: ActorSystem,
    stack: AsyncExitStack,
    on_undecodable: Callable[[BaseException], None],
    *,
    trace: bool,
) -> Ports:
    """Where the stages run: on this loop, or as processes with a run directory that lasts as long as ``stack``.

    Args:
        system: Home of stages on this loop.
        on_undecodable: Called when a stage process sends what is no message.
        trace: Stages record what they do.
    """
    if config.transport == "inproc":
        from actorpp.coordinator.inproc import InprocPorts  # imports torch

        return InprocPorts(system, trace=trace)
    wiring = WiringSpec(
        driver="",
        run_dir="",
        control_host=config.control_host,
        tensor_transport="nccl" if config.uses_nccl else "gloo",
        deadline_s=config.dist_timeout,
        trace=trace,
        log_level=config.log_level,
    )
    return ProcessPorts(
        stack.enter_context(run_dir()),
        wiring,
        on_undecodable,
        threads=config.threads(),
        warm_spares=config.warm_spares,
    )


def make_scheduler(config: EngineConfig, planning: Planning, policy: ChunkPolicy, num_pages: int) -> Scheduler:
    """The scheduler for so many KV pages."""
    limits = planning.limits
    return Scheduler(
        SchedulerConfig(
            num_stages=config.stages,
            async_depth=config.async_depth,
            lookahead=config.lookahead,
            num_pages=num_pages,
            page_size=config.page_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_prefill_tokens=limits.max_prefill_tokens,
            max_running_requests=limits.max_running_requests,
            max_queued_requests=limits.max_queued_requests,
        ),
        policy,
        epoch=0,
        costs=planning.costs,
    )

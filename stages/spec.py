"""Everything one stage process must know before it starts, as one value. No torch here: the driver writes it.

The driver encodes it as JSON into an environment variable of the child; it says nothing about endpoints, which travel
in ``hello``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from actorpp.errors import ConfigError

STAGE_SPEC_VARIABLE = "ACTORPP_STAGE_SPEC"


class StageSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of one pipeline.

    Attributes:
        stage: Index of this stage, 0-based.
        num_stages: Stages of the pipeline.
        lo: First decoder layer of this stage (global index).
        hi: One past its last decoder layer.
        model_path: Local folder of the checkpoint (safetensors and config.json, or config.json alone for dummies).
        dtype: Name of a torch dtype; ``auto`` is the checkpoint's, as far as the device has it.
        device: torch device, such as ``cpu`` or ``cuda:1``.
        threads: Compute threads on a CPU.
        page_size: Tokens in one KV page.
        context_length: Most tokens that one request may have.
        max_running_requests: Most requests that hold pages at once.
        load_format: ``dummy`` makes random weights from the configuration alone.
        async_depth: Steps whose sampled ids may wait on the device.
        seed: Seed of the dummy weights.
        attention_backend: ``auto``, or a name that ``actorpp.stages.backend_names`` knows.
        kv_tokens: KV capacity asked for, in tokens; else memory decides.
        mem_fraction_static: Share of the device's memory for weights and KV pages of all stages on it.
        colocated: Stages that share this device's memory.
        poison_freed: Debugging: fill the pages of retired requests with NaN.
    """

    stage: int
    num_stages: int
    lo: int
    hi: int
    model_path: str
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 1
    page_size: int = 64
    context_length: int = 8192
    max_running_requests: int = 64
    load_format: Literal["auto", "dummy"] = "auto"
    async_depth: int = 1
    seed: int = 0
    attention_backend: Literal["auto", "native", "flash", "sdpa", "flashinfer", "flash_attn"] = "auto"
    kv_tokens: int | None = None
    mem_fraction_static: float = 0.4
    colocated: int = 1
    poison_freed: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the ids."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head and samples."""
        return self.stage == self.num_stages - 1

    def to_env(self) -> dict[str, str]:
        """The environment variable that carries this spec to the stage's process."""
        return {STAGE_SPEC_VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> StageSpec:
        """The spec that ``to_env`` put into ``environ``.

        Raises:
            ConfigError: The variable is missing or does not decode.
        """
        try:
            return msgspec.json.decode(environ[STAGE_SPEC_VARIABLE], type=cls)
        except KeyError:
            raise ConfigError(f"the environment variable {STAGE_SPEC_VARIABLE} is not set") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{STAGE_SPEC_VARIABLE} does not decode: {error}") from None

"""The engine's options: names, defaults, limits, and where values come from.

Precedence: command line, then environment (``ACTORPP_STAGES=4``), then the file of ``--config``, then the default.
A value that cannot work on its own ends as a ConfigError here; what depends on the model (more stages than layers, a
context longer than the model's) is checked where the model is known. No torch here.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml  # type: ignore[import-untyped]
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from actorpp.errors import ConfigError

ENV_PREFIX = "ACTORPP_"

# Other systems' spellings of the same option, as flag names with underscores; accepted as flags and in config files.
ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("model_path",),
    "stages": ("pp_size", "pipeline_parallel_size"),
    "max_running_requests": ("max_num_seqs",),
    "context_length": ("max_model_len",),
    "async_depth": ("pp_async_batch_depth",),
}
DEFAULT_CHUNK = 512
DEFAULT_SMOOTH_FACTOR = 0.75
DEFAULT_DYNAMIC_CHUNK = 2048  # the first chunk of sglang: long enough to show how attention grows
# The largest chunk of planned bounds the memory of a step, and how long decode and short prompts wait behind it. On
# CPUs, where a step's fixed cost is small beside a thousand tokens, longer ones gain nothing.
LARGEST_CHUNK = {"cpu": 2048, "cuda": 8192}

SERVER_FLAGS = (
    "host",
    "port",
    "zmq_port",
    "insecure_bind",
    "zmq_host",
    "curve_key",
    "curve_allow",
    "connection_file",
    "served_model_name",
    "api_key",
    "sse_keep_alive",
    "client_timeout",
    "drain_timeout",
)
"""Options that mean something only where a socket is served."""

_FIELD_OF_ALIAS = {alias: field for field, aliases in ALIASES.items() for alias in aliases}

_file_values: ContextVar[dict[str, Any]] = ContextVar("file_values", default={})  # noqa: B039 - never mutated

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SchedulingLimits(msgspec.Struct, frozen=True):
    """The scheduler's limits with every derived default filled in, in tokens but for the policy and the last two."""

    chunk_policy: str
    chunked_prefill_size: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_running_requests: int
    max_queued_requests: int


class EngineConfig(BaseSettings):
    """All options of an engine, validated and frozen. ``None`` means that the value is derived, as described.

    Constructing it reads the environment as well; ``EngineConfig.load`` adds a file. Raises ConfigError, with the
    option's name as ``param``.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, validate_default=False
    )

    # Descriptions are also the command line's help.

    model: str | None = Field(
        None, description="Hub id, local folder or GGUF file. [default: SmolLM2-135M-Instruct, embedded]"
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights, from a config alone.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the checkpoint's, where the device has it."
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto: CUDA where there is one. cuda:N: that GPU only.",
    )
    attention_backend: Literal["auto", "native", "flash", "sdpa", "flashinfer", "flash_attn"] = Field(
        "auto",
        description="auto: native on CPUs that have it, else flash; on CUDA flashinfer or flash_attn, "
        "if installed, else sdpa.",
    )
    context_length: Positive | None = Field(
        None, description="Tokens of prompt and output together. [default: the model's]"
    )

    stages: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="Pipeline stages, one process each.")
    layer_partition: Annotated[Literal["auto"] | tuple[Positive, ...] | None, NoDecode] = Field(
        None,
        description="Layers of each stage, like 8,8,7,7; auto: by what they cost. "
        "[default: even, the remainder on the last stages]",
    )
    threads_per_stage: Positive | None = Field(
        None, description="Compute threads of each stage. [default: usable cores / stages]"
    )
    transport: Literal["process", "inproc"] = Field("process", description="Stages as processes, or all in this one.")
    tensor_transport: Literal["auto", "nccl", "gloo", "inproc"] = Field(
        "auto", description="How hidden states move. auto: NCCL on CUDA, gloo on CPU."
    )
    control_host: str | None = Field(
        None,
        min_length=1,
        description="Address of the sockets between driver and stages, which then speak CURVE. [default: ipc sockets]",
    )

    chunk_policy: str | None = Field(
        None,
        min_length=1,
        description="planned, fixed, sglang, or your own class as package.module:Class. "
        "[default: planned; fixed with --chunked-prefill-size; sglang with --enable-dynamic-chunking]",
    )
    chunked_prefill_size: int | None = Field(
        None,
        description="Prompt tokens per chunk; -1: the whole prompt at once. sglang begins with it, planned stays "
        "below. [default: 512; 2048 for sglang; for planned 2048 on CPUs, 8192 on CUDA]",
    )
    enable_dynamic_chunking: bool = Field(
        False, description="As in SGLang: chunks shrink as the history grows. Means --chunk-policy sglang."
    )
    dynamic_chunking_smooth_factor: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Of --chunk-policy sglang: 0 keeps the first size, 1 smooths nothing. [default: 0.75]"
    )
    max_num_batched_tokens: Positive | None = Field(
        None, description="Tokens per step, decode and prefill. [default: one chunk and one token per running request]"
    )
    max_prefill_tokens: Positive | None = Field(
        None, description="Prompt tokens of one request per step. [default: --max-num-batched-tokens]"
    )
    max_running_requests: Annotated[int, Field(ge=1, le=65536)] = Field(32, description="Requests computed at once.")
    max_queued_requests: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        256, description="Requests that may wait; more is refused as overload."
    )
    async_depth: Annotated[int, Field(ge=0, le=64)] = Field(
        1, description="Sampled steps that wait for their host copy; slots at most = stages + depth."
    )
    lookahead: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Steps in flight beyond the slots.")

    page_size: Annotated[int, Field(ge=1, le=4096)] = Field(16, description="Tokens per KV page.")
    kv_tokens: Positive | None = Field(
        None, description="Tokens that the KV cache holds. [default: from --mem-fraction-static]"
    )
    mem_fraction_static: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Share of memory for weights and KV, without --kv-tokens. [default: 0.85 on CUDA, 0.4 on CPU]"
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to serve on, HTTP and ZeroMQ.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="Port of HTTP; 0: any free one, printed.")
    zmq_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="Port of ZeroMQ; 0: any free one, printed.")
    insecure_bind: bool = Field(
        False, description="Allow a --host that other machines can reach. Nothing is encrypted: trusted networks only."
    )
    zmq_host: str | None = Field(None, min_length=1, description="Address of ZeroMQ alone. [default: --host]")
    curve_key: Path | None = Field(
        None, description="Server's .key_secret file: ZeroMQ clients are encrypted, and must be in --curve-allow."
    )
    curve_allow: Path | None = Field(
        None, description="Folder with the .key file of each ZeroMQ client that may connect; with --curve-key."
    )
    connection_file: Path | None = Field(
        None, description="Where a server writes its endpoint, key and administrator's token, for its owner alone."
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="Name that clients know the model by. [default: --model]"
    )
    api_key: str | None = Field(
        None,
        min_length=1,
        repr=False,
        exclude=True,  # from what is printed and saved, like the results of bench: it is a secret
        description="Key that HTTP clients must give, for all but /health; not of ZeroMQ. [default: none]",
    )
    sse_keep_alive: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        30.0, description="Seconds of silence in an HTTP stream after which a comment is sent; 0: never."
    )
    client_timeout: Seconds = Field(
        120.0,
        description="Seconds for which an HTTP client may send nothing more of a request, or read nothing of its "
        "answer, before its connection is ended and the request aborted.",
    )
    drain_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        30.0, description="Seconds for running requests to end after SIGTERM, before they are aborted."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="For requests without a seed of their own, and dummy weights. [default: random, and 0]"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="Of the logs on stderr.")

    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        5, description="Stages started again within five minutes; one more ends the engine."
    )
    warm_spares: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="Processes kept ready, with everything imported, to become a stage that has died."
    )
    startup_timeout: Seconds = Field(600.0, description="Seconds for the stages to load.")
    watchdog_timeout: Seconds = Field(300.0, description="Seconds without a finished step while work waits.")
    dist_timeout: Seconds = Field(600.0, description="Seconds for one operation between two stages.")
    shutdown_timeout: Seconds = Field(3.0, description="Seconds for stages to leave before they are killed.")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _config_error(error, given=values) from None

    @classmethod
    def load(cls, config_file: Path | None = None, **options: Any) -> EngineConfig:
        """Options (None counts as not given) over environment over file over defaults. Raises ConfigError."""
        token = _file_values.set({} if config_file is None else read_config_file(config_file))
        try:
            return cls(**{name: value for name, value in options.items() if value is not None})
        finally:
            _file_values.reset(token)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=_file_values.get())

    @field_validator("layer_partition", mode="before")
    @classmethod
    def _split_partition(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) and value != "auto" else value

    @field_validator("chunked_prefill_size")
    @classmethod
    def _chunk_or_whole(cls, value: int | None) -> int | None:
        if value is not None and value != -1 and value < 1:
            raise ValueError(f"must be at least 1, or -1 for the whole prompt at once, got {value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _stages_follow_partition(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A partition alone says how many stages there are."""
        partition = cls._split_partition(values.get("layer_partition"))
        if values.get("stages") is None and isinstance(partition, list | tuple):
            values = {**values, "stages": len(partition)}
        return values

    @model_validator(mode="after")
    def _fit_together(self) -> EngineConfig:
        if isinstance(self.layer_partition, tuple) and len(self.layer_partition) != self.stages:
            raise ValueError(
                f"--layer-partition names {len(self.layer_partition)} stages, but --stages is {self.stages}: "
                "give one number of layers for each stage"
            )
        if (self.curve_key is None) != (self.curve_allow is None):
            raise ValueError("--curve-key and --curve-allow go together: the server's key, and whom it lets in")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_running_requests:
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than --max-running-requests "
                f"{self.max_running_requests}: a step has a token for each of them"
            )
        if self.kv_tokens is not None and self.kv_tokens < self.page_size:
            raise ValueError(f"--kv-tokens {self.kv_tokens} is less than one page: --page-size is {self.page_size}")
        if self.transport == "inproc" and self.tensor_transport not in ("auto", "inproc"):
            raise ValueError(f"--tensor-transport {self.tensor_transport} needs --transport process")
        if self.transport == "process" and self.tensor_transport == "inproc":
            raise ValueError("--tensor-transport inproc needs --transport inproc")
        if self.enable_dynamic_chunking and self.chunk_policy not in (None, "sglang"):
            raise ValueError(f"--enable-dynamic-chunking means --chunk-policy sglang, not {self.chunk_policy}")
        if self.dynamic_chunking_smooth_factor is not None and self.policy_name != "sglang":
            raise ValueError(
                f"--dynamic-chunking-smooth-factor is of --chunk-policy sglang, but the policy is {self.policy_name}"
            )
        if self.transport == "inproc" and self.warm_spares:
            raise ValueError("--warm-spares needs --transport process")
        if self.transport == "inproc" and self.control_host is not None:
            raise ValueError("--control-host needs --transport process")
        if self.device == "cpu" and self.tensor_transport == "nccl":
            raise ValueError("--tensor-transport nccl needs --device cuda")
        return self

    @property
    def policy_name(self) -> str:
        """The chunk policy: the one that is named, or that the other chunking options mean."""
        if self.enable_dynamic_chunking:
            return "sglang"
        return self.chunk_policy or ("planned" if self.chunked_prefill_size is None else "fixed")

    @property
    def num_slots(self) -> int:
        """Micro-batches that can be between two of their own decode steps at once; the scheduler may use fewer."""
        return self.stages + self.async_depth

    @property
    def window(self) -> int:
        """Steps in flight at most."""
        return self.num_slots + self.lookahead

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``; ``auto`` is CUDA where the driver sees a device."""
        if self.device == "auto":
            return "cuda" if Path("/dev/nvidia0").exists() else "cpu"
        return self.device.partition(":")[0]

    @property
    def uses_nccl(self) -> bool:
        """Whether tensors travel over NCCL."""
        wanted = self.tensor_transport
        return wanted == "nccl" or (wanted == "auto" and self.transport == "process" and self.device_type == "cuda")

    def stage_device(self, stage: int) -> str:
        """Device of one stage: ``cuda`` gives each stage a GPU of its own, ``cuda:N`` puts all on one."""
        if self.device_type == "cpu":
            return "cpu"
        if ":" in self.device or self.transport == "inproc":
            return self.device if ":" in self.device else "cuda:0"
        return f"cuda:{stage}"

    def threads(self) -> int:
        """Compute threads of each stage."""
        return self.threads_per_stage or max(1, len(os.sched_getaffinity(0)) // self.stages)

    def memory_fraction(self, device_type: str) -> float:
        """Share of the memory of a device ("cuda" or "cpu") that the stages on it may fill together."""
        return self.mem_fraction_static or (0.85 if device_type == "cuda" else 0.4)

    def scheduling_limits(self, context_length: int) -> SchedulingLimits:
        """The scheduler's limits for a model of this context length."""
        policy = self.policy_name
        defaults = {"planned": LARGEST_CHUNK[self.device_type], "sglang": DEFAULT_DYNAMIC_CHUNK}
        default = min(defaults.get(policy, DEFAULT_CHUNK), context_length)
        chunk = context_length if self.chunked_prefill_size == -1 else self.chunked_prefill_size or default
        batched = self.max_num_batched_tokens or chunk + self.max_running_requests
        return SchedulingLimits(
            chunk_policy=policy,
            chunked_prefill_size=chunk,
            max_num_batched_tokens=batched,
            max_prefill_tokens=self.max_prefill_tokens or batched,
            max_running_requests=self.max_running_requests,
            max_queued_requests=self.max_queued_requests,
        )


def flag_of(field: str) -> str:
    """``async_depth`` → ``--async-depth``."""
    return "--" + field.replace("_", "-")


def read_config_file(path: Path) -> dict[str, Any]:
    """Options from a YAML, JSON or TOML file, keys as fields; hyphens and aliases are accepted. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix.lower():
            case ".json":
                values = json.loads(text)
            case ".toml":
                values = tomllib.loads(text)
            case ".yaml" | ".yml":
                values = yaml.safe_load(text)
            case other:
                raise ConfigError(f"--config {path}: the name must end in .yaml, .json or .toml, not {other!r}")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", param="config") from None
    except (ValueError, yaml.YAMLError) as error:  # JSON's, TOML's and UTF-8's errors are all ValueErrors
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}", param="config") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected a mapping from options to values", param="config")
    return by_field(values, where=f"--config {path}: ")


def by_field(values: Mapping[Any, Any], *, where: str = "") -> dict[str, Any]:
    """Options by the names of EngineConfig's fields; hyphens and other systems' spellings are accepted.

    Raises:
        ConfigError: An option is unknown, or given twice; ``where`` begins the message.
    """
    options: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        field = _FIELD_OF_ALIAS.get(name, name)
        if field not in EngineConfig.model_fields:
            raise ConfigError(f"{where}unknown option {key!r}", param=str(key))
        if field in options:
            raise ConfigError(f"{where}{key!r} says again what another key says", param=field)
        options[field] = value
    return options


def _config_error(error: ValidationError, given: dict[str, Any]) -> ConfigError:
    lines = []
    param = None
    for item in error.errors():
        field = str(item["loc"][0]) if item["loc"] else None
        message = item["msg"].removeprefix("Value error, ")
        if field is None:
            lines.append(message)
            continue
        param = param or field
        env = ENV_PREFIX + field.upper()
        source = flag_of(field) if field in given or env not in os.environ else env
        if item["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]}, got {item['input']!r}"
        lines.append(f"{source}: {message}")
    return ConfigError("; ".join(lines), param=param)

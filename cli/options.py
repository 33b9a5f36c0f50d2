"""The flags of the commands, with the spellings of other systems as aliases.

Values are checked by EngineConfig and by the request's own rules, not here, so that a value from the environment or a
file is held to the same limits. Every default is None, "not given"; the help states what then happens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from actorpp.config import ALIASES, SERVER_FLAGS, EngineConfig, flag_of

PROMPT, SAMPLING, OUTPUT = "Prompt", "Sampling", "Output"
MODEL, PIPELINE, SCHEDULING, MEMORY, SERVER = "Model", "Pipeline", "Scheduling", "KV memory", "Server and process"


def _option(name: str, panel: str, help: str, metavar: str = "") -> Any:
    flags = [flag_of(spelling) for spelling in (name, *ALIASES.get(name, ()))]
    help = help.replace("[", r"\[")  # not markup
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


def _engine(field: str, panel: str, metavar: str = "") -> Any:
    """An option of EngineConfig; its description is the help."""
    info = EngineConfig.model_fields[field]
    default = f"{info.default:g}" if isinstance(info.default, float) else str(info.default)
    derived = info.default is None or info.default is False  # the description says how
    help = (info.description or "") + ("" if derived else f" [default: {default}]")
    return _option(field, panel, help, metavar)


# --- the request ---

Prompt = Annotated[str | None, _option("prompt", PROMPT, "Text to complete, as it stands.", "TEXT")]
PromptFile = Annotated[
    Path | None, _option("prompt_file", PROMPT, "File whose text to complete, as it stands; - is stdin.", "FILE")
]
PromptTokensFile = Annotated[
    Path | None, _option("prompt_tokens_file", PROMPT, "File with a JSON list of token ids to complete.", "FILE")
]
Chat = Annotated[
    bool, _option("chat", PROMPT, "Answer the prompt as a user's message, through the model's chat template.")
]
MaxTokens = Annotated[int | None, _option("max_tokens", PROMPT, "Tokens to generate at most. [default: 16]", "N")]
IgnoreEos = Annotated[bool, _option("ignore_eos", PROMPT, "Go on past end-of-sequence tokens, until --max-tokens.")]

N = Annotated[
    int | None,
    _option("n", PROMPT, "Answers, each sampled for itself, with --json and a temperature. [default: 1]", "N"),
]
MinTokens = Annotated[int | None, _option("min_tokens", PROMPT, "Tokens before which nothing stops. [default: 0]", "N")]
Stop = Annotated[
    list[str] | None, _option("stop", PROMPT, "End before this string in the answer; may be repeated.", "TEXT")
]
StopTokenIds = Annotated[
    str | None,
    _option("stop_token_ids", PROMPT, "Ids that end the answer, like 5,17, beside end-of-sequence.", "ID,ID,..."),
]
IncludeStop = Annotated[
    bool, _option("include_stop_str_in_output", PROMPT, "Leave the stop string, or stop token, in the answer's text.")
]

Temperature = Annotated[float | None, _option("temperature", SAMPLING, "0 is greedy. [default: 0]", "X")]
TopK = Annotated[int | None, _option("top_k", SAMPLING, "Keep the K likeliest tokens; 0 keeps all. [default: 0]", "K")]
TopP = Annotated[
    float | None, _option("top_p", SAMPLING, "Keep the likeliest tokens that reach probability P. [default: 1]", "P")
]
MinP = Annotated[
    float | None,
    _option("min_p", SAMPLING, "Keep tokens of at least P times the likeliest one's probability. [default: 0]", "P"),
]
RepetitionPenalty = Annotated[
    float | None, _option("repetition_penalty", SAMPLING, "Above 1 discourages repetition. [default: 1]", "X")
]
PresencePenalty = Annotated[
    float | None,
    _option("presence_penalty", SAMPLING, "Off the logits of tokens that the answer has. [default: 0]", "X"),
]
FrequencyPenalty = Annotated[
    float | None,
    _option("frequency_penalty", SAMPLING, "Off them for each time that the answer has the token. [default: 0]", "X"),
]
LogitBias = Annotated[
    list[str] | None, _option("logit_bias", SAMPLING, "Add BIAS to a token's logit; may be repeated.", "ID=BIAS")
]
Seed = Annotated[int | None, _engine("seed", SAMPLING, "N")]

LogProbs = Annotated[
    int | None,
    _option("logprobs", OUTPUT, "With --json: each token's log-probability, and those of the K likeliest.", "K"),
]
PromptLogProbs = Annotated[
    int | None, _option("prompt_logprobs", OUTPUT, "The same for the prompt's tokens, with --json.", "K")
]
Json = Annotated[bool, _option("json", OUTPUT, "Print one JSON object on stdout and nothing else there.")]
Trace = Annotated[
    Path | None, _option("trace", OUTPUT, "Write every stage's spans as Chrome trace JSON when done.", "FILE")
]
LogLevel = Annotated[str | None, _engine("log_level", OUTPUT, "debug|info|warning|error")]

# --- the engine ---

Model = Annotated[str | None, _engine("model", MODEL, "MODEL")]
LoadFormat = Annotated[str | None, _engine("load_format", MODEL, "auto|dummy")]
Dtype = Annotated[str | None, _engine("dtype", MODEL, "auto|float32|bfloat16|float16")]
Device = Annotated[str | None, _engine("device", MODEL, "auto|cpu|cuda|cuda:N")]
AttentionBackend = Annotated[
    str | None, _engine("attention_backend", MODEL, "auto|native|flash|sdpa|flashinfer|flash_attn")
]
ContextLength = Annotated[int | None, _engine("context_length", MODEL, "N")]

Stages = Annotated[int | None, _engine("stages", PIPELINE, "P")]
LayerPartition = Annotated[str | None, _engine("layer_partition", PIPELINE, "N,N,...|auto")]
ThreadsPerStage = Annotated[int | None, _engine("threads_per_stage", PIPELINE, "N")]
AsyncDepth = Annotated[int | None, _engine("async_depth", PIPELINE, "N")]
Lookahead = Annotated[int | None, _engine("lookahead", PIPELINE, "N")]
TransportKind = Annotated[str | None, _engine("transport", PIPELINE, "process|inproc")]
TensorTransport = Annotated[str | None, _engine("tensor_transport", PIPELINE, "auto|nccl|gloo|inproc")]

ChunkPolicy = Annotated[str | None, _engine("chunk_policy", SCHEDULING, "POLICY")]
ControlHost = Annotated[str | None, _engine("control_host", PIPELINE, "ADDRESS")]

ChunkedPrefillSize = Annotated[int | None, _engine("chunked_prefill_size", SCHEDULING, "N")]
EnableDynamicChunking = Annotated[bool, _engine("enable_dynamic_chunking", SCHEDULING)]
SmoothFactor = Annotated[float | None, _engine("dynamic_chunking_smooth_factor", SCHEDULING, "X")]
MaxNumBatchedTokens = Annotated[int | None, _engine("max_num_batched_tokens", SCHEDULING, "N")]
MaxPrefillTokens = Annotated[int | None, _engine("max_prefill_tokens", SCHEDULING, "N")]
MaxRunningRequests = Annotated[int | None, _engine("max_running_requests", SCHEDULING, "N")]
MaxQueuedRequests = Annotated[int | None, _engine("max_queued_requests", SCHEDULING, "N")]

PageSize = Annotated[int | None, _engine("page_size", MEMORY, "N")]
KvTokens = Annotated[int | None, _engine("kv_tokens", MEMORY, "N")]
MemFractionStatic = Annotated[float | None, _engine("mem_fraction_static", MEMORY, "X")]

Host = Annotated[str | None, _engine("host", SERVER, "ADDRESS")]
Port = Annotated[int | None, _engine("port", SERVER, "PORT")]
ZmqPort = Annotated[int | None, _engine("zmq_port", SERVER, "PORT")]
ServedModelName = Annotated[str | None, _engine("served_model_name", SERVER, "NAME")]
ApiKey = Annotated[str | None, _engine("api_key", SERVER, "KEY")]
SseKeepAlive = Annotated[float | None, _engine("sse_keep_alive", SERVER, "S")]
ClientTimeout = Annotated[float | None, _engine("client_timeout", SERVER, "S")]
DrainTimeout = Annotated[float | None, _engine("drain_timeout", SERVER, "S")]
InsecureBind = Annotated[bool, _engine("insecure_bind", SERVER)]
ZmqHost = Annotated[str | None, _engine("zmq_host", SERVER, "ADDRESS")]
CurveKey = Annotated[Path | None, _engine("curve_key", SERVER, "FILE")]
CurveAllow = Annotated[Path | None, _engine("curve_allow", SERVER, "FOLDER")]
ConnectionFile = Annotated[Path | None, _engine("connection_file", SERVER, "FILE")]
ConfigFile = Annotated[
    Path | None,
    _option(
        "config",
        SERVER,
        "YAML, JSON or TOML file with any engine options. Flags and ACTORPP_ variables go before it.",
        "FILE",
    ),
]
MaxRestarts = Annotated[int | None, _engine("max_restarts", SERVER, "N")]
WarmSpares = Annotated[int | None, _engine("warm_spares", SERVER, "N")]
StartupTimeout = Annotated[float | None, _engine("startup_timeout", SERVER, "S")]
WatchdogTimeout = Annotated[float | None, _engine("watchdog_timeout", SERVER, "S")]
DistTimeout = Annotated[float | None, _engine("dist_timeout", SERVER, "S")]
ShutdownTimeout = Annotated[float | None, _engine("shutdown_timeout", SERVER, "S")]


# --- commands that start an engine of their own ---


def engine_flags() -> dict[str, Any]:
    """By field of EngineConfig (and ``config``): the options above that any command with an engine takes."""
    by_flag = {flag_of(field): field for field in (*EngineConfig.model_fields, "config") if field not in SERVER_FLAGS}
    options = ((annotation, get_args(annotation)[1:]) for annotation in list(globals().values()))
    return {
        by_flag[info[0].default]: annotation
        for annotation, info in options
        if info and isinstance(info[0], typer.models.OptionInfo) and info[0].default in by_flag
    }


def with_engine_flags(command: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """The command with every flag of the engine behind its own: its parameter ``engine`` gets those that were given.

    ``without``: fields of EngineConfig that would change nothing here, so that the command has no flags for them.
    """
    flags = {field: annotation for field, annotation in engine_flags().items() if field not in without}
    own = inspect.signature(command, eval_str=True)
    parameters = [parameter for parameter in own.parameters.values() if parameter.name != "engine"]
    for field, annotation in flags.items():
        default = False if annotation.__origin__ is bool else None
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field, kind, default=default, annotation=annotation))

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        given = {name: values.pop(name) for name in flags}
        command(
            **values, engine={name: value for name, value in given.items() if value is not None and value is not False}
        )

    wrapped.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapped


def load_config(engine: dict[str, Any], **defaults: Any) -> EngineConfig:
    """The configuration that the flags of ``with_engine_flags`` ask for, over environment and file. Raises ConfigError.

    ``defaults`` are a command's own, for options that neither flag, environment nor file set.
    """
    options = dict(engine)
    file = options.pop("config", None)
    config = EngineConfig.load(file, **options)
    missing = {name: value for name, value in defaults.items() if name not in config.model_fields_set}
    return EngineConfig.load(file, **options, **missing) if missing else config

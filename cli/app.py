"""The commands and their flags."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from actorpp.cli import options as o
from actorpp.cli.bench import bench
from actorpp.cli.profile import profile
from actorpp.cli.report import report
from actorpp.cli.tune import tune
from actorpp.config import SERVER_FLAGS

app = typer.Typer(
    help="Pipeline-parallel LLM inference for long prompts.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench, name="bench")
app.command(short_help="Make a page of traces.")(report)
app.command(short_help="Measure what steps cost each stage.")(profile)
app.command(short_help="Find the best chunking.")(tune)

PROMPT_FLAGS = ("prompt", "prompt_file", "prompt_tokens_file")
REQUEST_FLAGS = (
    "chat", "n", "max_tokens", "ignore_eos", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "logprobs", "prompt_logprobs",
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"actorpp {version('actorpp')}")
        except PackageNotFoundError:
            typer.echo("actorpp (not installed: running from its source)")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def actorpp(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(short_help="Complete a prompt, or serve until Ctrl-C.")
def run(
    prompt: o.Prompt = None,
    prompt_file: o.PromptFile = None,
    prompt_tokens_file: o.PromptTokensFile = None,
    chat: o.Chat = False,
    max_tokens: o.MaxTokens = None,
    n: o.N = None,
    ignore_eos: o.IgnoreEos = False,
    min_tokens: o.MinTokens = None,
    stop: o.Stop = None,
    stop_token_ids: o.StopTokenIds = None,
    include_stop_str_in_output: o.IncludeStop = False,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    logit_bias: o.LogitBias = None,
    seed: o.Seed = None,
    logprobs: o.LogProbs = None,
    prompt_logprobs: o.PromptLogProbs = None,
    json: o.Json = False,
    trace: o.Trace = None,
    log_level: o.LogLevel = None,
    model: o.Model = None,
    load_format: o.LoadFormat = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    attention_backend: o.AttentionBackend = None,
    context_length: o.ContextLength = None,
    stages: o.Stages = None,
    layer_partition: o.LayerPartition = None,
    threads_per_stage: o.ThreadsPerStage = None,
    async_depth: o.AsyncDepth = None,
    lookahead: o.Lookahead = None,
    transport: o.TransportKind = None,
    tensor_transport: o.TensorTransport = None,
    control_host: o.ControlHost = None,
    chunk_policy: o.ChunkPolicy = None,
    chunked_prefill_size: o.ChunkedPrefillSize = None,
    enable_dynamic_chunking: o.EnableDynamicChunking = False,
    dynamic_chunking_smooth_factor: o.SmoothFactor = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    max_prefill_tokens: o.MaxPrefillTokens = None,
    max_running_requests: o.MaxRunningRequests = None,
    max_queued_requests: o.MaxQueuedRequests = None,
    page_size: o.PageSize = None,
    kv_tokens: o.KvTokens = None,
    mem_fraction_static: o.MemFractionStatic = None,
    host: o.Host = None,
    port: o.Port = None,
    zmq_port: o.ZmqPort = None,
    insecure_bind: o.InsecureBind = False,
    zmq_host: o.ZmqHost = None,
    curve_key: o.CurveKey = None,
    curve_allow: o.CurveAllow = None,
    connection_file: o.ConnectionFile = None,
    served_model_name: o.ServedModelName = None,
    api_key: o.ApiKey = None,
    sse_keep_alive: o.SseKeepAlive = None,
    client_timeout: o.ClientTimeout = None,
    drain_timeout: o.DrainTimeout = None,
    config: o.ConfigFile = None,
    max_restarts: o.MaxRestarts = None,
    warm_spares: o.WarmSpares = None,
    startup_timeout: o.StartupTimeout = None,
    watchdog_timeout: o.WatchdogTimeout = None,
    dist_timeout: o.DistTimeout = None,
    shutdown_timeout: o.ShutdownTimeout = None,
) -> None:
    """Complete a prompt on a pipeline of stage processes, or serve until Ctrl-C when there is no prompt.

    Flags of the engine may also come from the environment (ACTORPP_STAGES=4) or from the file of --config.

    Exit codes: 0 done, 1 failed, 2 bad options, model or request, 130 ended by Ctrl-C.
    """
    given: dict[str, Any] = {
        name: value for name, value in locals().items() if value is not None and value is not False
    }
    raise typer.Exit(_run(given))


@app.command(
    short_help="The same as run, with the model first: actorpp serve MODEL.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def serve(context: typer.Context) -> None:
    """As people write it who come from vLLM; flags and everything else are those of ``run``."""
    from actorpp.errors import ConfigError

    arguments = list(context.args)
    if arguments and not arguments[0].startswith("-"):
        if any(argument.partition("=")[0] in ("--model", "--model-path") for argument in arguments):
            raise ConfigError(f"--model says again what {arguments[0]!r} says", param="model")
        arguments.insert(0, "--model")
    command = typer.main.get_command(app)
    raise typer.Exit(command.main(["run", *arguments], prog_name="actorpp", standalone_mode=False) or 0)


@app.command(name="chat", short_help="Talk to a running server.")
def chat_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server, as actorpp run prints it.")],
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", envvar="ACTORPP_API_KEY", help="The server's key.", show_default=False
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system message.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", help="Tokens of an answer at most.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="X", help=r"0 is greedy. \[default: 1]", show_default=False)
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", metavar="", help="TTFT, tokens/s and tokens behind each answer.")
    ] = False,
) -> None:
    """A conversation: a line is a message. Ctrl-C ends an answer, Ctrl-D the conversation."""
    from actorpp.cli.chat import ChatOptions, chat

    raise typer.Exit(chat(ChatOptions(url, api_key, system, max_tokens, temperature, stats)))


def _run(given: dict[str, Any]) -> int:
    """Sort the flags given into the engine's and the request's, and run. Nothing is parsed and then ignored."""
    from actorpp.cli import loop
    from actorpp.cli.display import reserved_stdout
    from actorpp.cli.run import RunOptions
    from actorpp.cli.run import run as run_engine
    from actorpp.config import EngineConfig, flag_of
    from actorpp.errors import ConfigError
    from actorpp.logs import configure_logging

    config = EngineConfig.load(
        given.get("config"), **{name: value for name, value in given.items() if name in EngineConfig.model_fields}
    )
    has_prompt = any(name in given for name in PROMPT_FLAGS)
    for name in SERVER_FLAGS if has_prompt else REQUEST_FLAGS:
        if name in given:
            why = "only without a prompt: nothing is served" if has_prompt else "only with a prompt"
            raise ConfigError(f"{flag_of(name)} works {why}", param=name)
    for name in ("n", "logprobs", "prompt_logprobs"):
        if name in given and "json" not in given:
            raise ConfigError(f"{flag_of(name)} needs --json", param=name)
    trace: Path | None = given.get("trace")
    if trace is not None and not trace.parent.is_dir():
        raise ConfigError(f"--trace {trace}: no such folder {trace.parent}", param="trace")
    options = RunOptions(_request(given, config.seed) if has_prompt else None, given.get("json", False), trace)
    configure_logging(config.log_level)
    with reserved_stdout() as output:
        grace = config.shutdown_timeout + 2.5
        if has_prompt:
            return loop.run(lambda: run_engine(config, options, output), grace=grace)
        drain = loop.Drain(config.drain_timeout)
        return loop.run(lambda: run_engine(config, options, output, drain), grace=grace, drain=drain)


def _request(given: dict[str, Any], seed: int | None) -> Any:
    from actorpp.cli.run import read_text, read_token_ids
    from actorpp.errors import ConfigError
    from actorpp.serving.request import parse_request

    sources = [f"--{name.replace('_', '-')}" for name in PROMPT_FLAGS if name in given]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)} exclude each other", param="prompt")
    fields: dict[str, Any] = {name: given[name] for name in REQUEST_FLAGS if name in given and name != "chat"}
    fields["seed"] = seed
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(_bias(entry) for entry in fields["logit_bias"])
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = [_id(entry) for entry in fields["stop_token_ids"].split(",")]
    if "prompt_tokens_file" in given:
        if "chat" in given:
            raise ConfigError("--chat needs text: --prompt or --prompt-file", param="chat")
        fields["prompt_tokens"] = read_token_ids(given["prompt_tokens_file"], "--prompt-tokens-file")
    else:
        text = read_text(given["prompt_file"], "--prompt-file") if "prompt_file" in given else given["prompt"]
        if "chat" in given:
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = text
    return parse_request(fields)


def _id(entry: str) -> int:
    from actorpp.errors import ConfigError

    try:
        return int(entry)
    except ValueError:
        raise ConfigError(f"--stop-token-ids: {entry!r} is no token id", param="stop_token_ids") from None


def _bias(entry: str) -> tuple[int, float]:
    from actorpp.errors import ConfigError

    token, _, bias = entry.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias {entry}: expected ID=BIAS, like 42=-100", param="logit_bias") from None

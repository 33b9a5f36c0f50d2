"""What ``actorpp run`` does once its flags are read: one completion, or serving until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from actorpp.cli.display import Output, figures
from actorpp.cli.loop import Drain
from actorpp.cli.memory import give_large_blocks_back, set_apart_what_stays
from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.errors import ConfigError
from actorpp.progress import ProgressDisplay
from actorpp.serving.api import Progress
from actorpp.serving.completion import CompletionResult, Delta
from actorpp.serving.gateway import Gateway, Prepared
from actorpp.serving.request import CompletionRequest
from actorpp.serving.zmq_server import ZmqServer
from actorpp.transport.addresses import is_loopback
from actorpp.transport.curve import CurveServer
from actorpp.transport.sockets import close_context

if TYPE_CHECKING:
    from actorpp.serving.http.server import HttpServer

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

T = TypeVar("T")


@dataclass(frozen=True)
class RunOptions:
    """What is not the engine's: the request (none serves instead) and the form of the output."""

    request: CompletionRequest | None
    json: bool
    trace: Path | None


def read_text(path: Path, flag: str) -> str:
    """The text of a prompt file, unchanged; ``-`` is stdin. Raises ConfigError."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", param=flag) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: not UTF-8 at byte {error.start}", param=flag) from None


def read_token_ids(path: Path, flag: str) -> list[int]:
    """The JSON list of ids in a file; their range is checked with the request. Raises ConfigError."""
    try:
        ids = json.loads(read_text(path, flag))
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: not JSON: {error}", param=flag) from None
    if not isinstance(ids, list):
        raise ConfigError(f"{flag} {path}: expected a JSON list of token ids", param=flag)
    return ids


async def run(config: EngineConfig, options: RunOptions, output: Output, drain: Drain | None = None) -> int:
    """Start the engine, do it, end the engine. Returns the exit code; raises ActorppError.

    Args:
        drain: Asks a server to finish what it has begun, and end.
    """
    display = ProgressDisplay()
    engine = Engine(config, on_startup=display.startup, trace=options.trace is not None)
    gateway = Gateway(engine, config.served_model_name or config.model or DEFAULT_MODEL_NAME)
    try:
        if options.request is None:
            from actorpp.serving.http.server import HttpServer  # a completion does without FastAPI's half second

            if config.transport == "process":  # else the stages compute here
                give_large_blocks_back()
            # The sockets first: a taken port is known before a model is loaded.
            with HttpServer(
                config.host,
                config.port,
                watchdog_s=config.watchdog_timeout,
                allow_remote=config.insecure_bind,
                api_key=config.api_key,
                keep_alive_s=config.sse_keep_alive,
                patience_s=config.client_timeout,
            ) as http:
                async with (
                    _zmq_server(config) as zmq,
                    _started(engine, options.trace, display),
                    gateway,
                ):
                    display.close()
                    serving = _serve(http, zmq, gateway, drain or Drain(0), output, as_json=options.json)
                    await _unless_failed(gateway, serving)
        else:
            await engine.locate()  # what the model cannot complete is known before it is loaded
            async with gateway:
                prepared = await gateway.prepare(options.request)
                async with _started(engine, options.trace, display):
                    work = _complete(gateway, prepared, display, output, as_json=options.json)
                    await _unless_failed(gateway, work)
    finally:
        display.close()
        close_context()  # once last replies have left, within the time that the server gave them
    return 0


def _zmq_server(config: EngineConfig) -> ZmqServer:
    """Raises ConfigError when a key file cannot be used, or a key for HTTP would leave this door open beside it."""
    curve = None
    if config.curve_key is not None and config.curve_allow is not None:
        curve = CurveServer.load(config.curve_key, config.curve_allow)
    elif config.api_key is not None and config.zmq_host is None and not is_loopback(config.host):
        raise ConfigError(
            f"--api-key guards HTTP alone, and {config.host} opens ZeroMQ too: "
            "give --zmq-host 127.0.0.1, or turn CURVE on",
            param="api_key",
        )
    return ZmqServer(
        config.zmq_host or config.host,
        config.zmq_port,
        curve=curve,
        allow_remote=config.insecure_bind,
        connection_file=config.connection_file,
    )


@contextlib.asynccontextmanager
async def _started(engine: Engine, trace: Path | None, display: ProgressDisplay) -> AsyncIterator[None]:
    async with engine:
        if engine.config.layer_partition == "auto":
            counts = (hi - lo for lo, hi in (stage.layers for stage in engine.stats().stages))
            display.close()
            print(f"layer partition: {','.join(map(str, counts))} (auto)", file=sys.stderr)
        try:
            yield
        except asyncio.CancelledError:  # a server is ended so, and has a trace too
            if trace is not None:
                await engine.write_trace(trace)
            raise
        if trace is not None:
            await engine.write_trace(trace)


def _announcement(http: HttpServer, zmq: ZmqServer, gateway: Gateway, *, as_json: bool) -> str:
    """What is served where."""
    about = {
        "http": http.url,
        "endpoint": zmq.endpoint,
        "model": gateway.model_name,
        "stages": gateway.engine.num_stages,
        "context_length": gateway.context_length,
    }
    if as_json:
        return json.dumps(about) + "\n"
    line = "serving {model} at {http} and {endpoint} ({stages} stages, context {context_length}); Ctrl-C ends it\n"
    return line.format(**about)


async def _serve(
    http: HttpServer, zmq: ZmqServer, gateway: Gateway, drain: Drain, output: Output, *, as_json: bool
) -> None:
    """Answer at both doors until cancelled, or until what was under way when ``drain`` came has ended."""
    try:
        async with asyncio.TaskGroup() as doors:
            open_doors = doors.create_task(zmq.serve(gateway)), doors.create_task(http.serve(gateway))
            # ZeroMQ answers from its task's first turn on; until HTTP does, the system takes its connections.
            await asyncio.sleep(0)
            set_apart_what_stays()
            output.write(_announcement(http, zmq, gateway, as_json=as_json))
            await drain.requested.wait()
            await gateway.drain()
            for door in open_doors:
                door.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _complete(
    gateway: Gateway, prepared: Prepared, display: ProgressDisplay, output: Output, *, as_json: bool
) -> None:
    completion = gateway.submit(prepared)
    try:
        async for event in completion:
            match event:
                case Progress(computed, total):
                    display.show("prefill", computed, total, "tokens")
                case Delta(_, text):
                    display.close()
                    if not as_json:
                        output.write(text)
                case CompletionResult():
                    display.close()
                    if as_json:
                        output.write(msgspec.json.encode(event.fields()).decode() + "\n")
                    else:
                        output.write("\n")
                        print(figures(event.metrics), file=sys.stderr)
    finally:
        completion.abort()


async def _unless_failed(gateway: Gateway, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, or what the engine as a whole failed with, if that comes first."""
    working = asyncio.create_task(work)
    failing = asyncio.create_task(gateway.engine.failed())
    try:
        await asyncio.wait((working, failing), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await failing
        return await working
    finally:
        working.cancel()
        failing.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)

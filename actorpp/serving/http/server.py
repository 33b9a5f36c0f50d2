"""uvicorn in a loop that is someone else's: listens early, answers when there is a gateway, ends when told to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn

from actorpp.errors import ConfigError
from actorpp.serving.gateway import Gateway
from actorpp.serving.http.app import make_app
from actorpp.serving.http.patience import PatientProtocol
from actorpp.serving.http.runs import Runs
from actorpp.serving.live import Live
from actorpp.serving.looplag import LoopLag
from actorpp.serving.metrics import Metrics
from actorpp.transport.addresses import check_bind, tcp_endpoint

BACKLOG = 2048  # connections that the system accepts for us meanwhile
MAX_HEAD_BYTES = 64 << 10  # of a request's first line and headers
END_S = 1  # for last answers to leave when the server closes


class _Server(uvicorn.Server):
    """Signals are the command line's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Bound from ``__enter__`` on, so that a taken port is known before a model is loaded; answers from ``serve`` on.

    Args:
        host, port: Where to listen; port 0 is any free one, see ``url``.
        watchdog_s: Seconds without a finished step, while there is work, after which ``/health`` is red.
        allow_remote: Let ``host`` be other than loopback.
        api_key: What clients must give; None lets everybody in.
        keep_alive_s: Seconds of silence in a stream after which a comment is sent; 0 for never.
        patience_s: Seconds for which a client may stand still, see ``PatientProtocol``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        watchdog_s: float = 300.0,
        allow_remote: bool = False,
        api_key: str | None = None,
        keep_alive_s: float = 30.0,
        patience_s: float = 120.0,
    ) -> None:
        self._host, self._port = host, port
        self._allow_remote = allow_remote
        self._watchdog_s = watchdog_s
        self._api_key = api_key
        self._keep_alive_s = keep_alive_s
        self._patience_s = patience_s

    def __enter__(self) -> HttpServer:
        """Bind. Raises ConfigError when the port is taken or the address is not allowed."""
        check_bind(tcp_endpoint(self._host, self._port), self._allow_remote)
        host = "127.0.0.1" if self._host == "localhost" else self._host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = f"port {self._port} on {host} is already in use" if taken else f"cannot listen on {host}: {error}"
            raise ConfigError(reason, param="port" if taken else "host") from None
        port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if family == socket.AF_INET6 else f"http://{host}:{port}"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    async def serve(self, gateway: Gateway) -> None:
        """Answer until cancelled. What is then unfinished is aborted, and its clients are told so."""
        runs, lag = Runs(gateway), LoopLag()
        metrics, live = Metrics(gateway.engine, lag), Live(gateway)
        app = make_app(
            gateway,
            runs,
            metrics,
            live,
            watchdog_s=self._watchdog_s,
            api_key=self._api_key,
            keep_alive_s=self._keep_alive_s,
        )
        config = uvicorn.Config(
            app,
            # h11 bounds what comes before a body, which httptools, where it is installed, does not.
            http=partial(PatientProtocol, patience_s=self._patience_s),  # type: ignore[arg-type]
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=END_S,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        measuring = asyncio.create_task(lag.run())
        try:
            await asyncio.shield(serving)
        finally:
            metrics.close()
            live.close()
            measuring.cancel()
            runs.stop()
            server.should_exit = True
            await serving

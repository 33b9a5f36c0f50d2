"""The routes: each reads a body, asks the Gateway, and writes an answer. What they mean is docs/http.md's subject."""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from actorpp.errors import ActorppError, InvalidRequestError
from actorpp.serving.gateway import Gateway
from actorpp.serving.http.answers import ChatShape, Shape, TextShape
from actorpp.serving.http.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    StreamOptions,
    TokenizeBody,
    chat_request,
    completion_requests,
    tokenize_request,
)
from actorpp.serving.http.connection import ClientGoneError, EventStream, while_connected
from actorpp.serving.http.decoding import decode
from actorpp.serving.http.errors import HttpError, error_response
from actorpp.serving.http.page import add_page
from actorpp.serving.http.runs import Runs
from actorpp.serving.http.schema import body_schema, describe
from actorpp.serving.live import Live
from actorpp.serving.metrics import CONTENT_TYPE, Metrics
from actorpp.serving.request import CompletionRequest

MAX_BODY_BYTES = 32 << 20
OPEN_PATHS = ("/health",)

B = TypeVar("B", bound=msgspec.Struct)


class ApiKey:
    """Middleware: without the key, only OPEN_PATHS answer. The comparison takes the same time for every wrong key.

    The key comes as a bearer token, or as the password of whatever user: so a browser asks for it, and shows the page.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(_key_in(given), self._key):
                refusal = HttpError(401, "invalid_api_key", "give the server's key: Authorization: Bearer KEY")
                scheme = 'Basic realm="actorpp, the API key as password"' if scope["path"] == "/" else "Bearer"
                await error_response(refusal, {"WWW-Authenticate": scheme})(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _key_in(authorization: bytes) -> bytes:
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def make_app(
    gateway: Gateway,
    runs: Runs,
    metrics: Metrics,
    live: Live,
    *,
    watchdog_s: float,
    api_key: str | None = None,
    keep_alive_s: float = 30.0,
) -> FastAPI:
    """The application.

    Args:
        watchdog_s: Seconds without a finished step, while there is work, after which the server is not healthy.
        api_key: What clients must give; None lets everybody in.
        keep_alive_s: Seconds of silence in a stream after which a comment is sent; 0 for never.
    """
    # The interactive documentation of FastAPI loads scripts from elsewhere; /openapi.json is whole without it.
    app = FastAPI(title="actorpp", version=server_version(), docs_url=None, redoc_url=None)
    started, model = int(time.time()), gateway.model_name
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    _handle_errors(app)

    async def body_of(request: Request, type: type[B]) -> B:
        """Read, decoded beside the loop where that takes long. Raises HttpError, InvalidRequestError."""
        parts: list[bytes] = []
        length = 0
        async for part in request.stream():
            length += len(part)
            if length > MAX_BODY_BYTES:
                raise HttpError(413, "body_too_large", f"the body is over {MAX_BODY_BYTES} bytes")
            parts.append(part)
        data = b"".join(parts)
        body = await gateway.off_loop(lambda: decode(data, type), len(data)) if len(data) > 4096 else decode(data, type)
        if (name := getattr(body, "model", None)) is not None and name != model:
            raise HttpError(404, "model_not_found", f"no model {name!r} here: it is {model!r}", param="model")
        return body

    async def answer(
        request: Request, body: SamplingBody, requests: Sequence[CompletionRequest], shape: Shape
    ) -> Response:
        run = await while_connected(request.receive, runs.start(requests))
        if body.stream:
            frames = runs.stream(
                run, shape, body.stream_options or StreamOptions(), progress=bool(body.return_progress)
            )
            return EventStream(frames, keep_alive_s=keep_alive_s, on_end=lambda: runs.end(run))
        try:
            return Response(
                await while_connected(request.receive, runs.whole(run, shape)), media_type="application/json"
            )
        finally:
            runs.end(run)

    add_page(app, live, runs)

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionBody), responses=describe(stream=True))
    async def completions(request: Request) -> Response:
        """Complete one or several prompts."""
        body = await body_of(request, CompletionBody)
        if body.stream and body.echo and body.logprobs is not None:
            raise InvalidRequestError("echo with logprobs: not in a stream", param="echo")
        size = len(body.prompt)
        requests = await gateway.off_loop(lambda: completion_requests(body), size)
        shape = TextShape(model, gateway.token_text, echo=bool(body.echo), echo_only=body.max_tokens == 0)
        return await answer(request, body, requests, shape)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody), responses=describe(stream=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat through the model's template."""
        body = await body_of(request, ChatBody)
        return await answer(request, body, [chat_request(body)], ChatShape(model, gateway.token_text))

    @app.get("/v1/models", responses=describe())
    async def models() -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [about_model()]})

    @app.get("/v1/models/{name:path}", responses=describe(404))
    async def model_by_name(name: str) -> Response:
        """The model, if it is that one."""
        if name != model:
            raise HttpError(404, "model_not_found", f"no model {name!r} here: it is {model!r}", param="model")
        return JSONResponse(about_model())

    def about_model() -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": started,
            "owned_by": "actorpp",
            "root": model,
            "max_model_len": gateway.context_length,
        }

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeBody), responses=describe(400))
    async def tokenize(request: Request) -> Response:
        """The ids of a text or a chat."""
        body = await body_of(request, TokenizeBody)
        ids = await while_connected(request.receive, gateway.tokenize(tokenize_request(body)))
        texts = None
        if body.return_token_strs:
            texts = await gateway.off_loop(lambda: [gateway.token_text(token) for token in ids], 64 * len(ids))
        answer = {"count": len(ids), "max_model_len": gateway.context_length, "token_strs": texts}
        content = await gateway.off_loop(lambda: msgspec.json.encode({**answer, "tokens": ids.tolist()}), 8 * len(ids))
        return Response(content, media_type="application/json")

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeBody), responses=describe(400))
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body = await body_of(request, DetokenizeBody)
        return JSONResponse({"prompt": await while_connected(request.receive, gateway.detokenize(body.tokens))})

    @app.get("/tokenizer_info", responses=describe())
    async def tokenizer_info() -> Response:
        """The tokenizer's configuration and the chat template."""
        return JSONResponse(gateway.tokenizer_info())

    @app.get("/health", responses=describe(503))
    async def health() -> Response:
        """200 while steps finish, or there is nothing to do; 503 when they do not, while a stage is brought back
        (requests are taken, and wait), and when the server is stopping."""
        stats = gateway.stats()
        stalled_s = stats.stalled_s
        if gateway.draining:
            return error_response(HttpError(503, "draining", "the server is stopping"))
        if stats.state != "ready":
            return error_response(HttpError(503, stats.state, f"the pipeline is {stats.state}"))
        if stalled_s >= watchdog_s:
            return error_response(HttpError(503, "stalled", f"no step has finished for {stalled_s:.0f} s"))
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", responses=describe(text="text/plain"), response_class=PlainTextResponse)
    async def metrics_() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/version", responses=describe())
    async def version_() -> Response:
        """The server's version."""
        return JSONResponse({"version": server_version()})

    return app


def _handle_errors(app: FastAPI) -> None:
    """Every error has the one form, those of routing too."""

    @app.exception_handler(ActorppError)
    async def ours(request: Request, error: ActorppError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientDisconnect)  # within its body
    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientDisconnect | ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(HttpError(error.status_code, code, message), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return error_response(ActorppError(f"internal error: {type(error).__name__}"))


def server_version() -> str:
    """Of the installed package."""
    try:
        return version("actorpp")
    except PackageNotFoundError:
        return "0+source"

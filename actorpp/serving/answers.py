"""What a request's client is told, out of its Job: by poll what is new, by a stream as it comes and as credit lasts.

Knows no sockets; a stream's replies leave through a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actorpp.errors import InvalidRequestError
from actorpp.serving.completion import Delta
from actorpp.serving.jobs import Job
from actorpp.serving.protocol import MAX_CREDIT, MAX_DELTAS_PER_POLL, Reply, with_tokens


def news(job: Job, cursor: int, *, raw: bool) -> tuple[Reply, int]:
    """The output from ``cursor`` on, and the cursor after it. With the last of it come the figures of the end.

    Raises:
        ActorppError: What the request ended with, once all output before it has been told.
    """
    stop = min(len(job.deltas), cursor + MAX_DELTAS_PER_POLL)
    deltas = job.deltas[cursor:stop]
    if job.error is not None and not deltas:
        raise job.cause()
    parts = [_part([delta for delta in deltas if delta.index == index]) for index in range(job.n)]
    body: dict[str, Any] = parts[0] if job.n == 1 else {"outputs": parts}
    body |= {"request": job.id, "cursor": stop, "progress": msgspec.to_builtins(job.progress)}
    reply = with_tokens(body, tuple(body.get("token_ids", ())), raw=raw_wanted(raw, job))
    reply.status = "more"
    if job.result is not None and stop == len(job.deltas):
        reply.status = "end"
        body["prompt_tokens"] = job.result.prompt_tokens
        for part, output in zip(parts, job.result.outputs, strict=True):
            part["finish_reason"] = output.finish_reason
            part["stop_reason"] = output.stop_reason
            part["metrics"] = msgspec.to_builtins(output.metrics)
        if job.result.prompt_logprobs is not None:
            body["prompt_logprobs"] = job.result.prompt_logprobs
    return reply, stop


def whole(job: Job, *, raw: bool) -> Reply:
    """The result of a request that has ended. Raises what it ended with, if there is none."""
    if job.result is None:
        raise job.cause()
    return with_tokens(job.result.fields(), job.result.token_ids, raw=raw_wanted(raw, job))


def raw_wanted(raw: bool, job: Job) -> bool:
    """Whether ids go into a buffer. Raises InvalidRequestError where there are several outputs."""
    if raw and job.n > 1:
        raise InvalidRequestError("raw_tokens: only with n = 1", param="raw_tokens")
    return raw


def _part(deltas: Sequence[Delta]) -> dict[str, Any]:
    """What is new of one output."""
    part: dict[str, Any] = {
        "text": "".join(delta.text for delta in deltas),
        "token_ids": [token for delta in deltas for token in delta.ids],
    }
    if logprobs := [row for delta in deltas for row in delta.logprobs]:
        part["logprobs"] = logprobs
    return part


class Stream:
    """The replies to one message, as its request's output comes.

    Each of them takes one credit, but for what follows the request's end: that is never held back, so a stream ends
    with its request. A reader without credit costs the pipeline nothing: what it has not taken is merged into the next
    reply. Credit that never comes makes the request an abandoned one.

    Args:
        credit: Replies that may be sent before ``give``.
        progress: Also tell of the prefill's progress when there is no output.
        send: Sends a reply; raises TransportError when the peer takes no more.
    """

    def __init__(self, job: Job, credit: int, *, raw: bool, progress: bool, send: Callable[[Reply], None]) -> None:
        self._job = job
        self._credit = credit
        self._raw = raw
        self._progress = progress
        self._send = send

    def give(self, credit: int) -> int:
        """More credit; returns how much there is now. Raises InvalidRequestError over the limit."""
        if self._credit + credit > MAX_CREDIT:
            raise InvalidRequestError(f"credit: {self._credit} is left, and {MAX_CREDIT} the most", param="credit")
        self._credit += credit
        self._job.changed()
        return self._credit

    async def run(self) -> Reply:
        """Send all but the last reply, and return that. Raises what the request ended with."""
        job, cursor, shown = self._job, 0, self._job.progress

        def has_news() -> bool:
            return len(job.deltas) > cursor or (self._progress and job.progress != shown)

        while True:
            await job.until(has_news)
            if not job.ended and not self._credit:
                await job.until(lambda: self._credit > 0, watched=False)
            shown = job.progress
            reply, cursor = news(job, cursor, raw=self._raw)
            if reply.status == "end":
                return reply
            self._credit -= 1
            self._send(reply)

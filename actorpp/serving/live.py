"""What the live page shows: the newest steps, requests and rates, as one snapshot after another.

It watches the engine's activity and keeps minutes of it, so that a page that is opened has a past to show. No HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from actorpp.serving.activity import RequestRecord, StepRecord
from actorpp.serving.gateway import Gateway

HISTORY_S = 300  # of rates and first tokens
MAX_FIRST_TOKENS = 600
MAX_PREFILLS = 16  # running prefills in a snapshot; more are counted


class Live:
    """History for pages that will come. ``close`` when the server ends."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._rates: deque[list[float]] = deque(maxlen=HISTORY_S)  # second, prompt tokens, output tokens
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_FIRST_TOKENS)  # when, TTFT
        self.failed = 0
        gateway.engine.activity.observers.append(self)

    def close(self) -> None:
        """Watch no more."""
        self._gateway.engine.activity.observers.remove(self)

    def about(self) -> dict[str, Any]:
        """What does not change."""
        gateway = self._gateway
        return {
            "model": gateway.model_name,
            "context_length": gateway.context_length,
            "chat": gateway.has_chat_template,
            "stages": [
                {"layers": stage.layers, "weight_bytes": stage.weight_bytes, "kv_bytes": stage.kv_bytes}
                for stage in gateway.stats().stages
            ],
        }

    def snapshot(self, after_step: int, after_s: float) -> dict[str, Any]:
        """This moment, with steps behind number ``after_step`` and rates and first tokens behind the time ``after_s``.

        Times are in seconds on the host's monotonic clock.
        """
        engine, now = self._gateway.engine, time.monotonic()
        stats, activity = engine.stats(), engine.activity
        prefills = engine.prefills()
        return {
            "now": now,
            "state": "draining" if self._gateway.draining else stats.state,
            "stages": [{"queue": stage.mailboxes.get("log", 0), "restarts": stage.restarts} for stage in stats.stages],
            "steps": [
                [step.number, step.prefill, step.decode, step.spans, step.rested]
                for step in activity.steps
                if step.number > after_step
            ],
            "running": stats.requests_running,
            "waiting": stats.requests_waiting,
            "finished": stats.requests_finished,
            "failed": self.failed,
            "in_flight": stats.steps_in_flight,
            "window": stats.window,
            "pages_used": stats.pages_used,
            "pages_total": stats.pages_total,
            "page_size": stats.page_size,
            "uptime_s": stats.uptime_s,
            "stalled_s": stats.stalled_s,
            "prefills": [
                {
                    "id": request.id,
                    "computed": request.computed,
                    "total": request.total,
                    "elapsed_s": request.elapsed_s,
                    "remaining_s": request.remaining_s,
                }
                for request in prefills[:MAX_PREFILLS]
            ],
            "more_prefills": max(0, len(prefills) - MAX_PREFILLS),
            "rates": [rate for rate in self._rates if rate[0] > after_s],
            "first_tokens": [entry for entry in self._first_tokens if entry[0] > after_s],
        }

    # --- the observer ---

    def on_step(self, step: StepRecord) -> None:
        second = float(int(time.monotonic()))
        if not self._rates or self._rates[-1][0] < second:
            self._rates.append([second, 0.0, 0.0])
        self._rates[-1][1] += step.prefill
        self._rates[-1][2] += step.decode

    def on_first_token(self, seconds: float) -> None:
        self._first_tokens.append((time.monotonic(), seconds))

    def on_token_gap(self, seconds: float) -> None:
        """Nothing that the page shows."""

    def on_ended(self, request: RequestRecord) -> None:
        self.failed += request.failed

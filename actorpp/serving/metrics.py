"""Prometheus metrics: vLLM's names behind ``actorpp_`` where it has one, and what only a pipeline has.

Values that the engine keeps anyway are read when they are asked for; distributions are observed as things happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actorpp.serving.activity import RequestRecord, StepRecord
from actorpp.serving.api import EngineLike
from actorpp.serving.looplag import LoopLag

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# A long prompt's first token may take an hour.
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 7200)
GAP_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
COUNT_BUCKETS = tuple(2**power for power in range(21))


class Metrics:
    """All metrics of one engine, in a registry of their own."""

    def __init__(self, engine: EngineLike, lag: LoopLag) -> None:
        self._engine = engine
        self.registry = CollectorRegistry()
        self.registry.register(_Snapshot(engine, lag))

        def histogram(name: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"actorpp_{name}", help, labels, registry=self.registry, buckets=buckets)

        def counter(name: str, help: str, labels: tuple[str, ...]) -> Counter:
            return Counter(f"actorpp_{name}", help, labels, registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "From submission to the first token.", TTFT_BUCKETS)
        self._gap = histogram("inter_token_latency_seconds", "Between two tokens of a request.", GAP_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "From submission to the end.", E2E_BUCKETS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS)
        self._generated = histogram("request_generation_tokens", "Output tokens of a request.", COUNT_BUCKETS)
        self._success = counter("request_success", "Ended requests, by their finish reason.", ("finished_reason",))
        self._failed = counter("request_failure", "Requests that ended with an error, by its code.", ("code",))
        self._iteration = histogram("iteration_tokens_total", "Tokens of a step.", COUNT_BUCKETS)
        self._chunk = histogram("chunk_tokens", "Prompt tokens of a step that has any.", COUNT_BUCKETS)
        seconds = histogram("stage_step_seconds", "Compute time of a step on a stage.", STEP_BUCKETS, ("stage",))
        self._seconds = [seconds.labels(str(stage)) for stage in range(engine.num_stages)]
        error = histogram(
            "stage_prediction_error_ratio",
            "Of a step's time on a stage, over the time: |predicted - measured| / measured.",
            ERROR_BUCKETS,
            ("stage",),
        )
        self._error = [error.labels(str(stage)) for stage in range(engine.num_stages)]
        engine.activity.observers.append(self)

    def close(self) -> None:
        """Observe no more."""
        self._engine.activity.observers.remove(self)

    def text(self) -> bytes:
        """Everything, in Prometheus's text format."""
        return generate_latest(self.registry)

    # --- the observer ---

    def on_step(self, step: StepRecord) -> None:
        self._iteration.observe(step.prefill + step.decode)
        if step.prefill:
            self._chunk.observe(step.prefill)
        for seconds, (start, end) in zip(self._seconds, step.spans, strict=True):
            seconds.observe(end - start)
        if step.predicted:
            for error, predicted, (start, end) in zip(self._error, step.predicted, step.spans, strict=True):
                error.observe(abs(predicted - (end - start)) / max(end - start, 1e-9))

    def on_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def on_token_gap(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def on_ended(self, request: RequestRecord) -> None:
        if request.failed:
            self._failed.labels(request.outcome).inc()
            return
        self._success.labels(request.outcome).inc()
        self._prompt.observe(request.prompt_tokens)
        self._generated.observe(request.generated)
        if request.metrics is not None:
            self._e2e.observe(request.metrics.e2e_s)


class _Snapshot(Collector):
    """What the engine knows at the moment of asking."""

    def __init__(self, engine: EngineLike, lag: LoopLag) -> None:
        self._engine = engine
        self._lag = lag

    def collect(self) -> Iterator[Metric]:
        stats, activity = self._engine.stats(), self._engine.activity

        def gauge(name: str, help: str, value: float) -> Metric:
            return GaugeMetricFamily(f"actorpp_{name}", help, value=value)

        def counter(name: str, help: str, value: float) -> Metric:
            return CounterMetricFamily(f"actorpp_{name}", help, value=value)

        yield gauge("num_requests_running", "Requests that are computed.", stats.requests_running)
        yield gauge("num_requests_waiting", "Requests that wait for their turn.", stats.requests_waiting)
        yield gauge(
            "kv_cache_usage_perc", "Share of the KV pages in use; 1 is all.", stats.pages_used / stats.pages_total
        )
        yield gauge("steps_in_flight", "Steps that stages have been sent and not finished.", stats.steps_in_flight)
        yield gauge("steps_window", "Steps in flight at most.", stats.window)
        yield gauge("stalled_seconds", "Since a step has finished, while there is work.", stats.stalled_s)
        yield gauge("event_loop_lag_seconds", "How late the driver's loop is.", self._lag.newest_s)
        yield gauge("event_loop_longest_stall_seconds", "The longest so far.", self._lag.longest_s)
        yield gauge(
            "event_loop_longest_held_seconds",
            "The longest without the time for which the machine had no CPU.",
            self._lag.longest_held_s,
        )
        yield counter("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
        yield counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield counter("steps", "Steps sent to the stages.", stats.steps)

        def by_stage(kind: Callable[..., Metric], name: str, help: str, values: list[float]) -> Metric:
            family = kind(f"actorpp_{name}", help, labels=["stage"])
            for stage, value in enumerate(values):
                family.add_metric([str(stage)], value)  # type: ignore[attr-defined]
            return family

        yield by_stage(CounterMetricFamily, "stage_busy_seconds", "Computing.", activity.busy_s)
        yield by_stage(
            CounterMetricFamily, "stage_bubble_seconds", "Idle while the pipeline had work.", activity.bubble_s
        )
        yield by_stage(
            CounterMetricFamily,
            "stage_p2p_bytes",
            "Hidden states passed on to the next stage.",
            [float(stage.sent_bytes) for stage in stats.stages],
        )
        yield by_stage(
            CounterMetricFamily,
            "stage_dead_letters",
            "Messages of epochs that had ended.",
            [float(stage.dead_letters) for stage in stats.stages],
        )
        yield by_stage(
            CounterMetricFamily,
            "stage_restarts",
            "Processes of the stage that were lost.",
            [float(stage.restarts) for stage in stats.stages],
        )
        waiting = GaugeMetricFamily(
            "actorpp_stage_mailbox_depth", "Messages that wait in a stage.", labels=["stage", "inbox"]
        )
        for stage, mailboxes in enumerate(stage.mailboxes for stage in stats.stages):
            for inbox, depth in mailboxes.items():
                waiting.add_metric([str(stage), inbox], depth)
        yield waiting
        yield by_stage(
            GaugeMetricFamily, "stage_weight_bytes", "Of weights.", [float(s.weight_bytes) for s in stats.stages]
        )
        yield by_stage(GaugeMetricFamily, "stage_kv_bytes", "Of KV pages.", [float(s.kv_bytes) for s in stats.stages])
        costs = GaugeMetricFamily(
            "actorpp_cost_model_seconds", "The cost model's coefficients.", labels=["stage", "coefficient"]
        )
        model = self._engine.cost_model()
        if model.in_seconds:  # before anything was measured only ratios mean something
            for stage, cost in enumerate(model.stages):
                for name, value in msgspec.structs.asdict(cost).items():
                    costs.add_metric([str(stage), name], value)
        yield costs
        depths = GaugeMetricFamily("actorpp_mailbox_depth", "Messages that wait.", labels=["actor", "inbox"])
        restarts = CounterMetricFamily("actorpp_actor_restarts", "Restarts of an actor.", labels=["actor"])
        for actor in self._engine.actors():
            restarts.add_metric([actor.name], actor.restarts)
            for inbox, depth in actor.depths.items():
                depths.add_metric([actor.name, inbox], depth)
        yield depths
        yield restarts

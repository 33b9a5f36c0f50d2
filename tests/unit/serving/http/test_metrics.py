"""``/metrics`` over a real engine: vLLM's names, and figures that add up to what was asked."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actorpp.serving.gateway import Gateway
from tests.unit.engine.support import served
from tests.unit.serving.http.support import client_of


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    return {
        sample.name.removeprefix("actorpp_") + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_figures_add_up(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        async with client_of(gateway) as client:
            before = await figures(client)
            assert before["num_requests_running"] == before["num_requests_waiting"] == 0
            fields = {"prompt": list(range(5, 45)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            for _ in range(3):
                assert (await client.post("/v1/completions", json=fields)).status_code == 200
            assert (await client.post("/v1/completions", json=fields | {"max_tokens": 10**6})).status_code == 400
            token = 4 * gateway.engine.checkpoint.hidden_size  # type: ignore[attr-defined]
            sent = (120 + 3 * 7) * token  # each token but the outputs' last, in float32
            after = await figures(client)
            while after["stage_p2p_bytes_total 0"] < sent:  # as of the heartbeats
                after = await figures(client)
        assert after["prompt_tokens_total"] == 120
        assert after["generation_tokens_total"] == 24
        assert after["request_success_total length"] == 3
        assert after["time_to_first_token_seconds_count"] == 3
        assert after["inter_token_latency_seconds_count"] == 21
        assert after["e2e_request_latency_seconds_count"] == 3
        assert after["request_prompt_tokens_sum"] == 120
        assert after["request_generation_tokens_sum"] == 24
        assert after["chunk_tokens_sum"] == 120
        assert after["kv_cache_usage_perc"] == pytest.approx(0, abs=0.1)
        # Beside them, segments that were issued before the end of their request was known.
        assert after["stage_p2p_bytes_total 0"] in range(sent, sent + 4 * token, token)
        assert after["stage_p2p_bytes_total 1"] == 0
        for stage in ("0", "1"):
            assert after[f"stage_busy_seconds_total {stage}"] > 0
            assert after[f"stage_bubble_seconds_total {stage}"] >= 0
            assert after[f"stage_step_seconds_count {stage}"] > 0
            assert after[f"cost_model_seconds b {stage}"] > 0
            assert after[f"stage_prediction_error_ratio_count {stage}"] > 0
            assert after[f"stage_restarts_total {stage}"] == after[f"stage_dead_letters_total {stage}"] == 0
            assert {after[f"stage_mailbox_depth {inbox} {stage}"] for inbox in ("log", "proxy", "output")} == {0}
        assert "cost_model_seconds b 0" not in before  # nothing was measured yet
        assert after["actor_restarts_total coordinator"] == 0
        assert after["mailbox_depth coordinator outputs"] == 0
        assert after["event_loop_longest_stall_seconds"] >= after["event_loop_lag_seconds"] >= 0
        assert after["event_loop_longest_stall_seconds"] >= after["event_loop_longest_held_seconds"] >= 0
        assert not gateway.engine.activity.observers  # the server is gone

    served(model, body)


def test_first_tokens_have_buckets_to_an_hour(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        async with client_of(gateway) as client:
            text = (await client.get("/metrics")).text
        assert 'actorpp_time_to_first_token_seconds_bucket{le="3600.0"}' in text

    served(model, body)

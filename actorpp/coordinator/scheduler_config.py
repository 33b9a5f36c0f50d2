"""The scheduler's limits, of one pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        num_slots: Decode micro-batches at most: stages + async_depth.
        window: Steps in flight: num_slots + lookahead.
        num_pages, page_size: KV capacity, the same ids on every stage.
        max_num_batched_tokens: Tokens of one step, at least max_running_requests.
        max_prefill_tokens: Prompt tokens of one request in one step.
    """

    num_stages: int
    async_depth: int
    lookahead: int
    num_pages: int
    page_size: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_running_requests: int
    max_queued_requests: int

    @property
    def num_slots(self) -> int:
        return self.num_stages + self.async_depth

    @property
    def window(self) -> int:
        return self.num_slots + self.lookahead

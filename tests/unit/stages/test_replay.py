"""A lost epoch under the shipped scheduler, on real stages: at every point the tokens are the undisturbed ones."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.request import Request
from actorpp.coordinator.scheduler import Scheduler
from actorpp.coordinator.scheduler_config import SchedulerConfig
from actorpp.stages.messages import Admit, Output, SamplingParams, Step
from tests.exactness.chain import Chain
from tests.unit.coordinator.support import Recorder
from tests.unit.stages.test_sampling_over_stages import IDS, PARAMS

PAGES = 30
COUNT = 8
MIXED = ("greedy", "seeded", "frequency", "min_tokens", "all")
WANTED = {"greedy": {"logprobs": 2, "prompt_logprobs": 1}, "all": {"logprobs": 0}}


def requests() -> list[Request]:
    """One with each set of parameters, of different lengths."""
    made = []
    for rid, name in enumerate(MIXED):
        fields = {field: getattr(PARAMS[name], field) for field in SamplingParams.__struct_fields__}
        fields |= WANTED.get(name, {})
        ids = IDS[8 * rid :]
        made.append(
            Request(
                rid=rid,
                prompt=array("i", ids).tobytes(),
                prompt_len=len(ids),
                max_tokens=COUNT - rid % 2,
                sampling=SamplingParams(**fields),
                stop_ids=frozenset(),
                sink=Recorder(),
            )
        )
    return made


class Stages:
    """The stages of a chain under a scheduler: an Output is in when the window is full, or nothing else can be done."""

    def __init__(self, chain: Chain, asked: list[Request]) -> None:
        self.chain = chain
        limits = {"max_num_batched_tokens": 64, "max_prefill_tokens": 48, "max_running_requests": 16}
        config = SchedulerConfig(2, 1, 1, PAGES, 16, max_queued_requests=16, **limits)
        self.scheduler = Scheduler(config, FixedChunks(25), epoch=1)
        self.asked = asked
        self.outputs: list[Output] = []
        self.answered = 0
        for request in asked:
            self.scheduler.submit(request)

    def lose_epoch(self) -> None:
        self.outputs.clear()
        self.chain.restart(16, PAGES)
        self.scheduler.restart(self.scheduler.epoch + 1)

    def run(self, lose_at: tuple[int, ...]) -> list[Any]:
        """To the end, losing the epoch when so many Outputs have come. Returns what each client got."""
        while True:
            entry = self.scheduler.next_entry()
            if entry is not None:
                self.apply(entry)
            elif self.outputs:
                self.scheduler.on_output(self.outputs.pop(0))
                self.answered += 1
                if self.answered in lose_at:
                    self.lose_epoch()
            else:
                assert self.scheduler.pool.used_pages == 0
                return [dataclasses.replace(request.sink, computed=[]) for request in self.asked]

    def apply(self, entry: Admit | Step) -> None:
        hidden = None
        known = {output.seq: output for output in self.outputs}
        for host in self.chain.hosts:
            if isinstance(entry, Admit):
                host.admit(entry)
            else:
                launched = host.launch(entry, hidden, known)
                hidden = launched.hidden
        if isinstance(entry, Step):
            ids, errors = self.chain.hosts[-1].fetch(launched)
            rows = {"logprobs": launched.logprobs, "prompt_logprobs": launched.prompt_logprobs}
            self.outputs.append(Output(epoch=entry.epoch, seq=entry.seq, ids=ids, errors=errors, **rows))


@pytest.fixture(scope="module")
def chain(tied: Path) -> Chain:
    return Chain(tied, 2, page_size=16, num_pages=PAGES)


@pytest.fixture(scope="module")
def undisturbed(chain: Chain) -> tuple[list[Any], int]:
    """What each client gets, and how many Outputs it takes."""
    stages = Stages(chain, requests())
    return stages.run(()), stages.answered


def test_the_undisturbed_run_gives_transformers_tokens(undisturbed: tuple[list[Any], int], tied: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied)
    out = model.generate(
        torch.tensor([IDS]),
        attention_mask=torch.ones(1, len(IDS), dtype=torch.int64),
        max_new_tokens=COUNT,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert undisturbed[0][0].ids == out[0, len(IDS) :].tolist()


def test_a_replay_at_every_point_gives_the_undisturbed_tokens(chain: Chain, undisturbed: tuple[list[Any], int]) -> None:
    expected, outputs = undisturbed
    assert outputs > 15
    for point in range(1, outputs):
        chain.restart(16, PAGES)
        stages = Stages(chain, requests())
        assert stages.run((point, point + 5)) == expected, f"epochs lost after {point} and {point + 5} outputs"
        assert stages.scheduler.epoch == 3 or stages.answered < point + 5

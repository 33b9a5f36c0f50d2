"""Stage hosts of one model, chained by hand in this process: what the pipeline computes, without actors or sockets."""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import msgspec
import torch

from actorpp.stages.config import read_json
from actorpp.stages.host import StageHost
from actorpp.stages.messages import Admit, FromOutput, Output, SamplingParams, Segment, Step
from actorpp.stages.partition import partition
from actorpp.stages.sampler import SampleRow, sample
from actorpp.stages.spec import StageSpec


class Chain:
    """All stages of one model.

    Args:
        path: The checkpoint.
        stages: Their number, or the layers of each.
        num_pages: Pages of each arena.
        options: Further fields of StageSpec.
    """

    def __init__(self, path: Path, stages: int | Sequence[int], *, num_pages: int = 64, **options: object) -> None:
        layers = (read_json(path / "config.json") or {})["num_hidden_layers"]
        cuts = partition(layers, stages) if isinstance(stages, int) else partition(layers, len(stages), stages)
        shared = {"num_stages": len(cuts), "model_path": str(path), "dtype": "float32", **options}
        self.hosts = [
            StageHost(StageSpec(stage=stage, lo=lo, hi=hi, **shared))  # type: ignore[arg-type]
            for stage, (lo, hi) in enumerate(cuts)
        ]
        self.seq = 0
        self.outputs: dict[int, Output] = {}
        for host in self.hosts:
            host.load()
            host.allocate(num_pages)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.hosts[0].spec.page_size

    def restart(self, page_size: int, num_pages: int) -> None:
        """Forget all requests and go on with other pages; the weights stay. Old contents become NaN."""
        for host in self.hosts:
            host.reset()
            host.spec = msgspec.structs.replace(host.spec, page_size=page_size)
            host.arena.page_size = page_size
            host.allocate(num_pages)
            host.arena.poison(range(num_pages))
        self.outputs.clear()

    def admit(
        self,
        rid: int,
        ids: Sequence[int],
        pages: Sequence[int],
        sampling: SamplingParams | None = None,
        prompt_len: int | None = None,
    ) -> None:
        """Admit a request on every stage; its ids go to the first and the last."""
        self.seq += 1
        for host in self.hosts:
            tokens = array.array("i", ids).tobytes() if host.is_first or host.is_last else None
            entry = Admit(0, self.seq, rid, prompt_len or len(ids), sampling or SamplingParams(), tuple(pages), tokens)
            host.admit(entry)

    def step(self, *segments: Segment, retire: Sequence[int] = ()) -> Output:
        """Run one step through all stages and return its output."""
        self.seq += 1
        step = Step(0, self.seq, 0, segments, tuple(retire))
        hidden: torch.Tensor | None = None
        for host in self.hosts:
            launched = host.launch(step, hidden, self.outputs)
            hidden = launched.hidden
        ids, errors = self.hosts[-1].fetch(launched)
        logprobs, prompt_logprobs = launched.logprobs, launched.prompt_logprobs
        self.outputs[step.seq] = Output(
            0, step.seq, ids, errors=errors, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
        return self.outputs[step.seq]

    def prefill(self, rid: int, length: int, chunk: int, *, start: int = 0, per_step: int = 1) -> Output:
        """Compute the prompt's positions ``start`` to ``length``; every chunk samples, ``per_step`` chunks a step."""
        cuts = [Segment(rid, at, min(chunk, length - at), None, True) for at in range(start, length, chunk)]
        for first in range(0, len(cuts), per_step):
            output = self.step(*cuts[first : first + per_step])
        return output

    def decode(self, rid: int, length: int, tokens: int, forced: Sequence[int] = ()) -> list[int]:
        """Generate ``tokens`` ids after a prefill of ``length`` whose output was the last one; the first is that one's.

        Args:
            forced: Feed these instead of the sampled ones.
        """
        picked = [self.outputs[self.seq].ids[-1]]
        for index in range(tokens - 1):
            source = FromOutput(self.seq, len(self.outputs[self.seq].ids) - 1)
            token = forced[index] if forced else source
            picked += self.step(Segment(rid, length + index, 1, token, True)).ids
        return picked


@contextmanager
def recorded_logits() -> Iterator[list[torch.Tensor]]:
    """Every row of logits that a last stage samples from meanwhile, each (vocab,) float32."""
    recorded: list[torch.Tensor] = []

    def recording(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
        recorded.extend(logits.float().clone())
        return sample(logits, rows)

    with patch("actorpp.stages.host.sample", recording):
        yield recorded

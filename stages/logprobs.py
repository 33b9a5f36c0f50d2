"""Log-probabilities of tokens on the last stage, from the model's own logits: before bias, penalties and temperature.

It never waits for the device: what is computed is encoded for the wire once it is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from actorpp.stages.messages import Logprobs, Segment, Step
from actorpp.stages.request import Request


class LogprobRow(NamedTuple):
    """Whose row of logits it is, and how many alternatives that request wants."""

    rid: int
    top: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at R rows, possibly still being computed on the device.

    Attributes:
        ids: (R, 1 + k) int64: the token that is there, then the k likeliest, best first.
        values: (R, 1 + k) float32, of the same tokens.
        ranks: (R,) int64, of the token that is there; 1 is the likeliest.
    """

    rows: tuple[LogprobRow, ...]
    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor

    def by_request(self, to_host: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, Logprobs]:
        """Each request's rows in order, with as many alternatives as it wants. ``to_host`` may wait."""
        ids, values = to_host(self.ids).int(), to_host(self.values)
        ranks = to_host(self.ranks).int()
        found = {}
        for rid, top in dict.fromkeys(self.rows):
            own = [index for index, row in enumerate(self.rows) if row.rid == rid]
            width = min(1 + top, ids.shape[1])
            found[rid] = Logprobs(
                top=width - 1,
                ids=_bytes(ids[own, :width]),
                values=_bytes(values[own, :width]),
                ranks=_bytes(ranks[own]),
            )
        return found


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[LogprobRow]) -> TokenLogprobs:
    """The log-softmax of each row at its token and at the likeliest ones.

    Args:
        logits: (R, vocab) of any float type.
        tokens: (R,) int64 ids, on the same device.
    """
    scores = logits.float()
    own = scores.gather(1, tokens[:, None])
    best = scores.topk(min(max(row.top for row in rows), scores.shape[1]), dim=1)
    return TokenLogprobs(
        rows=tuple(rows),
        ids=torch.cat((tokens[:, None], best.indices), dim=1),
        values=torch.cat((own, best.values), dim=1) - scores.logsumexp(dim=1, keepdim=True),
        ranks=(scores > own).sum(dim=1) + 1,
    )


def output_logprobs(
    segments: Sequence[Segment], requests: Mapping[int, Request], logits: torch.Tensor, ids: torch.Tensor
) -> TokenLogprobs | None:
    """Of the ids (R,) sampled for R segments, where requests want them; ``logits`` has at least R rows."""
    tops = [(index, s.rid, requests[s.rid].sampling.logprobs) for index, s in enumerate(segments)]
    rows = {index: LogprobRow(rid, top) for index, rid, top in tops if top is not None}
    if not rows:
        return None
    at = torch.tensor([*rows], device=logits.device)
    return token_logprobs(logits[at], ids[at], [*rows.values()])


def prompt_rows(step: Step, requests: Mapping[int, Request]) -> list[int]:
    """Where in the step's packed row lie the positions whose logits ``prompt_logprobs`` needs."""
    rows, offset = [], 0
    for segment in step.segments:
        request = requests[segment.rid]
        if request.sampling.prompt_logprobs is not None:
            first = offset - segment.start
            rows += [first + position for position in segment.prompt_logprob_rows(request.prompt_len)]
        offset += segment.length
    return rows


def prompt_logprobs(step: Step, requests: Mapping[int, Request], logits: torch.Tensor) -> TokenLogprobs | None:
    """Of the prompt tokens that follow the positions of ``prompt_rows``, of which ``logits`` has a row each."""
    tokens, rows = [], []
    for segment in step.segments:
        request = requests[segment.rid]
        top = request.sampling.prompt_logprobs
        if top is not None and request.tokens is not None:
            positions = segment.prompt_logprob_rows(request.prompt_len)
            tokens.append(request.tokens[positions.start + 1 : positions.stop + 1])
            rows += [LogprobRow(segment.rid, top)] * len(positions)
    return token_logprobs(logits, torch.cat(tokens).to(logits.device), rows) if rows else None


def _bytes(values: torch.Tensor) -> bytes:
    """Little-endian, row by row."""
    array = values.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()

"""Computing a step where the device's memory may not suffice: a request that does not fit is lost, and alone.

The segments that did not fit together are computed one after the other. A lost request's rows are NaN from then on, so
that the last stage, wherever it is, finds it broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog
import torch

from actorpp.stages.kv import PageTable
from actorpp.stages.messages import Step
from actorpp.stages.packed import pack
from actorpp.stages.request import Request

if TYPE_CHECKING:
    from actorpp.stages.host import StageHost

log = structlog.get_logger(__name__)

Part = tuple[PageTable, int, int]
"""Page table, first position and length of a segment."""
Rows = list[int] | None
"""Where in the packed row logits are wanted; None on stages that give hidden states."""


def compute_in_memory(
    host: StageHost,
    requests: Mapping[int, Request],
    step: Step,
    parts: list[Part],
    ids: torch.Tensor | None,
    hidden: torch.Tensor | None,
    rows: Rows,
) -> torch.Tensor:
    """``host.forward`` over the step, as far as memory goes.

    Args:
        requests: By rid; a lost one is marked, with the reason.
        parts: Of the step's segments, in order.
        ids, hidden: (1, T) ids on the first stage, (T, hidden_size) on the others.
    """
    out = _forward_if_it_fits(host, parts, ids, hidden, rows)
    if out is None:
        out = _forward_apart(host, requests, step, parts, ids, hidden, rows)
    elif rows is None:
        for segment, own in zip(step.segments, step.token_ranges, strict=True):
            if requests[segment.rid].lost:
                out[own.start : own.stop] = torch.nan
    return out


def _forward_apart(
    host: StageHost,
    requests: Mapping[int, Request],
    step: Step,
    parts: list[Part],
    ids: torch.Tensor | None,
    hidden: torch.Tensor | None,
    rows: Rows,
) -> torch.Tensor:
    """The segments one after the other; NaN where one does not fit even by itself."""
    shape = (step.num_tokens, host.hidden_size) if rows is None else (len(rows), int(host.model.config.vocab_size))
    out = torch.full(shape, torch.nan, dtype=host.dtype, device=host.device)
    for segment, part, own in zip(step.segments, parts, step.token_ranges, strict=True):
        request, tokens = requests[segment.rid], slice(own.start, own.stop)
        at = [*own] if rows is None else [index for index, row in enumerate(rows) if row in own]
        found = _forward_if_it_fits(
            host,
            [part],
            None if ids is None else ids[:, tokens],
            None if hidden is None else hidden[tokens],
            None if rows is None else [rows[index] - own.start for index in at],
        )
        if found is None:
            request.failure = f"stage {host.spec.stage} has no memory for {segment.length} tokens at once"
            log.warning("a request is lost: the device's memory is exhausted", rid=segment.rid, step=step.seq)
        request.lost = request.lost or found is None
        if at and found is not None and not request.lost:
            out[at] = found
    return out


def _forward_if_it_fits(
    host: StageHost, parts: list[Part], ids: torch.Tensor | None, hidden: torch.Tensor | None, rows: Rows
) -> torch.Tensor | None:
    """None where memory did not suffice; what the attempt held is free again then."""
    with suppress(torch.OutOfMemoryError):
        cache, positions = pack(parts, host.arena)
        return host.forward(ids, hidden, positions, cache, rows)
    if host.device.type == "cuda":
        torch.cuda.empty_cache()
    return None

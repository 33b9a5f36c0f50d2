"""One admitted request as a stage keeps it. What a stage does with it is the host's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from actorpp.stages.kv import PageTable
from actorpp.stages.messages import SamplingParams


@dataclass
class Request:
    """One admitted request as a stage knows it.

    Attributes:
        tokens: (n,) int64 ids that came with the Admit, on the first and last stage.
        computed: Tokens whose keys and values are in the arena.
        processors: On the last stage: what its logits go through before sampling.
        history: On the last stage, if a penalty needs it: ids by position, on the device.
        failure: Why this request has failed by itself; the last stage tells it with its next step.
        lost: Part of it did not fit in memory: what this stage computes of it means nothing.
    """

    prompt_len: int
    sampling: SamplingParams
    table: PageTable
    tokens: torch.Tensor | None = None
    computed: int = 0
    processors: Any = None
    history: torch.Tensor | None = None
    failure: str | None = None
    lost: bool = False

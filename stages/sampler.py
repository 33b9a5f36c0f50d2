"""Picks each sampling segment's next token on the last stage, once, with transformers' own logits processors.

Randomness is a pure function of (request seed, output position): the position's uniform number inverts the
distribution's cumulative sum, so batching, depth, stages and replays cannot change it. It never waits for the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actorpp.stages import native
from actorpp.stages.messages import SamplingParams


class SampleRow(NamedTuple):
    """What one row of logits needs.

    Attributes:
        params: The request's parameters.
        processors: Theirs, from ``processors``; made once for each request, for some copy to the device at first use.
        position: 0-based position of the token in the request's output.
        history: (n,) int64 ids of the prompt and the output so far, where ``needs_history``.
    """

    params: SamplingParams
    processors: LogitsProcessorList
    position: int
    history: torch.Tensor | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on ``seed`` and ``position`` alone."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class OutputPenalty:
    """Presence and frequency penalty over the output's tokens, which transformers lacks; defined as in vLLM."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[:, self.prompt_len :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def needs_history(params: SamplingParams) -> bool:
    """Whether a processor looks at the ids so far."""
    return bool(
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty or params.min_tokens
    )


def processors(params: SamplingParams, prompt_len: int, device: torch.device | str = "cpu") -> LogitsProcessorList:
    """transformers' processors for ``params``, in the order in which its ``generate`` applies them.

    The penalties that it lacks follow its repetition penalty, as in vLLM.
    """
    chain = LogitsProcessorList()
    if params.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        chain.append(OutputPenalty(prompt_len, params.presence_penalty, params.frequency_penalty))
    if params.min_tokens and params.end_ids:
        ends = list(params.end_ids)
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, ends, device=str(device)))
    if params.temperature > 0:
        if params.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k > 0:
            chain.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            chain.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            chain.append(MinPLogitsWarper(params.min_p))
    return chain


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick one id for each row.

    Args:
        logits: (R, vocab) of any float type.

    Returns:
        (R,) int64 ids, and (R,) bool that says which rows had NaN or only infinite logits; their ids mean nothing.
    """
    ids = _likeliest(logits)
    broken = ~torch.isfinite(logits.gather(1, ids[:, None])[:, 0])
    others = [index for index, row in enumerate(rows) if row.params.temperature > 0 or row.processors]
    if others:
        scores = logits.float()
        for index in others:
            ids[index] = _sample_one(scores[index : index + 1], rows[index])
    return ids, broken


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """(R,) int64: where the largest of each row is, the first of several; NaN counts as larger than all else."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    library = native.library()
    if library is None or logits.dtype != torch.bfloat16 or not logits.is_contiguous():
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))  # torch's takes four times as long
    ids = torch.empty(len(logits), dtype=torch.int64)
    library.actorpp_likeliest(logits.data_ptr(), ids.data_ptr(), *logits.shape)
    return ids


def _sample_one(scores: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """The id for one row of scores (1, vocab), as a tensor of no dimensions."""
    history = scores.new_empty(1, 0, dtype=torch.int64) if row.history is None else row.history[None]
    scores = row.processors(history, scores)[0]
    if row.params.temperature <= 0:
        return scores.argmax()
    cumulative = torch.softmax(scores.double(), dim=-1).cumsum(dim=-1)
    target = cumulative[-1:] * uniform(row.params.seed, row.position)
    return torch.searchsorted(cumulative, target, right=True)[0].clamp_(max=scores.shape[0] - 1)

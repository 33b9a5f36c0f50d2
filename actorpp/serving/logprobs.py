"""Log-probabilities as clients see them, from what the last stage sends."""

from __future__ import annotations

import sys
from array import array

import msgspec

from actorpp.stages.messages import Logprobs


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's log-probability before bias, penalties and temperature.

    Attributes:
        rank: 1 is the likeliest token at that place.
        top: Id and log-probability of the likeliest tokens there, best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def decode_logprobs(logprobs: Logprobs) -> tuple[TokenLogprob, ...]:
    """One for each row."""
    ids, values, ranks = _numbers("i", logprobs.ids), _numbers("f", logprobs.values), _numbers("i", logprobs.ranks)
    width = 1 + logprobs.top
    return tuple(
        TokenLogprob(
            ids[at], values[at], rank, tuple(zip(ids[at + 1 : at + width], values[at + 1 : at + width], strict=True))
        )
        for at, rank in zip(range(0, width * len(ranks), width), ranks, strict=True)
    )


def _numbers(code: str, data: bytes) -> array:  # type: ignore[type-arg]
    numbers = array(code, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

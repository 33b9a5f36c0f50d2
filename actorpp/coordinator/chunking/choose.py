"""Finds the policy that ``--chunk-policy`` names: one of ours, or a class of the user's own by its import path."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import structlog

from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.chunking.planned import PlannedChunks
from actorpp.coordinator.chunking.policy import ChunkPolicy, ChunkRequest, PolicyContext
from actorpp.coordinator.chunking.sglang import SglangChunks
from actorpp.errors import ConfigError

log = structlog.get_logger(__name__)

POLICIES: dict[str, Callable[[PolicyContext], ChunkPolicy]] = {
    "planned": PlannedChunks,
    "fixed": FixedChunks.of,
    "sglang": SglangChunks.of,
}


def find_policy(name: str) -> Callable[[PolicyContext], ChunkPolicy]:
    """What makes the policy ``planned``, ``fixed`` or ``sglang``, or the class that ``package.module:Class`` names.

    Raises:
        ConfigError: There is no such policy, or its module cannot be imported.
    """
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(POLICIES)
        raise ConfigError(
            f"no chunk policy {name!r}: give one of {known}, or a class of your own as package.module:Class",
            param="chunk_policy",
        )
    try:
        found: Callable[[PolicyContext], ChunkPolicy] = getattr(import_module(module), attribute)
    except Exception as error:
        raise _unusable(name, error) from error
    return found


def make_policy(name: str, context: PolicyContext) -> ChunkPolicy:
    """The policy of this name, as ``find_policy`` takes it, for a pipeline.

    Raises:
        ConfigError: As ``find_policy``, or it cannot be made, or what was made is no policy.
    """
    make = find_policy(name)
    if name in POLICIES:
        return make(context)
    try:
        policy = make(context)
    except Exception as error:
        raise _unusable(name, error) from error
    if not callable(getattr(policy, "next_chunk", None)):
        raise ConfigError(f"chunk policy {name} has no method next_chunk", param="chunk_policy")
    return _Checked(name, policy, FixedChunks.of(context))


def _unusable(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"chunk policy {name}: {type(error).__name__}: {error}", param="chunk_policy")


class _Checked:
    """A user's policy: once it fails or answers what is impossible, fixed chunks take its place, with a warning."""

    def __init__(self, name: str, policy: ChunkPolicy, fallback: ChunkPolicy) -> None:
        self._name, self._policy, self._fallback = name, policy, fallback

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        try:
            chunk = self._policy.next_chunk(request, history_len, remaining, budget)
        except Exception as error:
            return self._replace(f"{type(error).__name__}: {error}", request, history_len, remaining, budget)
        least = 0 if request.step_tokens else 1
        if isinstance(chunk, int) and least <= chunk <= min(remaining, budget):
            return chunk
        reason = f"it gave {chunk!r}, not {least} to {min(remaining, budget)} tokens"
        return self._replace(reason, request, history_len, remaining, budget)

    def _replace(self, reason: str, request: ChunkRequest, history: int, remaining: int, budget: int) -> int:
        if self._policy is not self._fallback:
            log.warning("a chunk policy has failed: chunks have one size from now on", policy=self._name, reason=reason)
            self._policy = self._fallback
        return self._fallback.next_chunk(request, history, remaining, budget)

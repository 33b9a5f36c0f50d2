"""Which policy a name means, and what becomes of a user's own that fails."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import structlog.testing

from actorpp.coordinator.chunking.choose import make_policy
from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.chunking.planned import PlannedChunks
from actorpp.coordinator.chunking.policy import ChunkRequest, PolicyContext
from actorpp.coordinator.chunking.sglang import SglangChunks
from actorpp.errors import ConfigError
from tests.unit.coordinator.chunking.support import context, model


class Own:
    """Answers what it is told to."""

    answer: Any = 100

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return min(self.answer, remaining) if self.answer == 100 else self.answer


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> type[Own]:
    """``own_policies:Own``."""
    module = ModuleType("own_policies")
    own: Any = type("Own", (Own,), {})
    module.__dict__.update(Own=own, NotMade=lambda: None, NoPolicy=lambda context: object())
    monkeypatch.setitem(sys.modules, "own_policies", module)
    return own


def test_the_names() -> None:
    made = [make_policy(name, context(model(), chunk_size=512)) for name in ("planned", "fixed", "sglang")]
    assert [type(policy) for policy in made] == [PlannedChunks, FixedChunks, SglangChunks]
    assert made[1] == FixedChunks(512, align=16)


def test_a_class_of_the_users_own(own: type[Own]) -> None:
    policy = make_policy("own_policies:Own", context(model()))
    assert policy.next_chunk(ChunkRequest(1, 250), 0, 250, 1000) == 100
    assert policy.next_chunk(ChunkRequest(1, 250), 200, 50, 1000) == 50


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("best", "planned, fixed, sglang.*package.module:Class"),
        ("no_such_module_here:Policy", "ModuleNotFoundError"),
        ("own_policies:Other", "AttributeError"),
        ("own_policies:NotMade", "TypeError"),
        ("own_policies:NoPolicy", "no method next_chunk"),
    ],
)
def test_what_is_no_policy_is_refused(own: type[Own], name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_policy(name, context(model()))
    assert caught.value.param == "chunk_policy"


@pytest.mark.parametrize("answer", [0, -5, 301, 2.5, None, ValueError("no idea")])
def test_an_own_policy_that_fails_is_replaced_once_with_a_warning(own: type[Own], answer: Any) -> None:
    policy = make_policy("own_policies:Own", context(model(), chunk_size=64))
    own.answer = answer
    with structlog.testing.capture_logs() as logs:
        assert policy.next_chunk(ChunkRequest(1, 300), 0, 300, 1000) == 64
        own.answer = 100
        assert policy.next_chunk(ChunkRequest(1, 300), 64, 236, 1000) == 64
    assert [entry["policy"] for entry in logs] == ["own_policies:Own"]


def test_behind_others_an_own_policy_may_wait(own: type[Own]) -> None:
    own.answer = 0
    policy = make_policy("own_policies:Own", context(model()))
    assert policy.next_chunk(ChunkRequest(1, 300, step_tokens=20), 0, 300, 1000) == 0

"""Dead letters and the wait-for graph, by themselves."""

from __future__ import annotations

from actorpp.runtime import ActorSystem, DeadLetter, DeadLetters, WaitFor, WaitGraph
from actorpp.runtime.deadletters import KEPT
from tests.unit.runtime.support import Note


def test_dead_letters_are_counted_observed_and_bounded() -> None:
    letters = DeadLetters()
    observed: list[DeadLetter] = []
    letters.observe(observed.append)
    for n in range(KEPT + 5):
        letters.add(DeadLetter("actor", "inbox", Note(n), "stopped" if n else "overflow"))
    assert letters.count == len(observed) == KEPT + 5
    letters.forget(observed.append)
    letters.add(DeadLetter("actor", "inbox", Note(KEPT + 5), "stopped"))
    assert len(observed) == KEPT + 5
    assert letters.by_reason == {"stopped": KEPT + 5, "overflow": 1}
    assert len(letters.recent) == KEPT
    assert letters.recent[0].message == Note(6)


def test_a_system_keeps_as_many_dead_letters_as_it_is_told_to() -> None:
    letters = ActorSystem(kept_letters=0).dead_letters
    letters.add(DeadLetter("actor", "inbox", Note(1), "stopped"))
    assert (letters.count, list(letters.recent)) == (1, [])


def test_every_cycle_is_found_once() -> None:
    edges = ["ab", "ba", "bc", "ca", "cd", "dd", "ef"]
    waits = [WaitFor(edge[0], edge[1], f"{edge[1]} to answer") for edge in edges]
    graph = WaitGraph((*waits, WaitFor("f", None, "a message")))
    assert graph.cycles() == [("a", "b"), ("a", "b", "c"), ("d",)]
    lines = str(graph).splitlines()
    assert lines[:3] == ["cycle: a -> b -> a", "cycle: a -> b -> c -> a", "cycle: d -> d"]
    assert lines[-1] == "f waits for a message"

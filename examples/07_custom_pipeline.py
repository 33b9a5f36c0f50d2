"""A pipeline of one's own around the model: a splitter before its stages and a scorer after them, in one actor system.

The splitter cuts a document into parts and asks the model about each of them, all in flight at once; the scorer ranks
what comes back by the model's own log-probabilities. Each is an actor with a bounded inbox, so a slow scorer slows the
splitter down, and nothing else.
"""

from __future__ import annotations

import asyncio
from math import exp
from statistics import fmean

import msgspec

from actorpp import Engine, EngineConfig, Gateway
from actorpp.runtime import Actor, ActorSystem, Address, Inbox, Request
from actorpp.serving.completion import CompletionResult
from actorpp.serving.request import CompletionRequest

DOCUMENT = """
A pipeline stage holds some layers of a model. While it computes one chunk of a prompt, the next stage computes the
chunk before it.

A mailbox is a bounded queue with a type. What comes too early waits in it, by its key.

The coordinator decides everything in one place. Stages apply its log in order.
"""


class Document(Request[int], frozen=True, tag="document"):
    """Asks for a text to be worked on; answered with its number of parts once all have been passed on."""

    text: str


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """What the model said about a part, and the log-probability of each token of it."""

    part: str
    summary: str
    logprobs: tuple[float, ...]


class GetBest(Request[Answered], frozen=True, tag="get_best"):
    """Asks for the best of the answers that came before."""


class Splitter(Actor):
    """Before the model: makes prompts of a document."""

    inbox = Inbox[Document](capacity=4)

    def __init__(self, gateway: Gateway, scorer: Address[Answered | GetBest]) -> None:
        self.gateway = gateway
        self.scorer = scorer

    @inbox.handler
    async def on_document(self, document: Document) -> int:
        parts = [" ".join(part.split()) for part in document.text.split("\n\n") if part.strip()]
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(self.summarise(part))
        return len(parts)

    async def summarise(self, part: str) -> None:
        messages = [{"role": "user", "content": f"Say in one short sentence: {part}"}]
        completion = await self.gateway.complete(CompletionRequest(messages=messages, max_tokens=40, logprobs=0))
        async for event in completion:
            if isinstance(event, CompletionResult):
                logprobs = tuple(token.logprob for token in event.logprobs or ())
                await self.scorer.tell(Answered(part, event.text, logprobs))


class Scorer(Actor):
    """After the model: keeps the answer that the model was surest of, by the geometric mean of its probabilities."""

    inbox = Inbox[Answered | GetBest](capacity=8)

    def __init__(self) -> None:
        self.scored: list[tuple[float, Answered]] = []

    @inbox.handler
    async def on_message(self, message: Answered | GetBest) -> Answered | None:
        match message:
            case GetBest():
                return max(self.scored, key=lambda pair: pair[0])[1]
            case Answered(_, summary, logprobs):
                self.scored.append((exp(fmean(logprobs)), message))
                print(f"{self.scored[-1][0]:.0%}: {summary}")
                return None


async def main() -> None:
    async with (
        ActorSystem("pipeline") as system,
        Engine(EngineConfig(stages=2), system=system) as engine,
        Gateway(engine, "default") as gateway,
    ):
        scorer = await system.spawn(Scorer, name="scorer")
        splitter = await system.spawn(lambda: Splitter(gateway, scorer[Scorer.inbox]), name="splitter")
        parts = await splitter[Splitter.inbox].ask(Document(DOCUMENT))
        best = await scorer[Scorer.inbox].ask(GetBest(), timeout=1.0)
        print(f"best of {parts}: {best.summary}")


if __name__ == "__main__":
    asyncio.run(main())

"""A fake engine with the shape of actorpp.engine.Engine, and a tiny tokenizer whose characters span several tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from actorpp.config import EngineConfig
from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.plan import ChunkPlan
from actorpp.coordinator.recovery import EngineState
from actorpp.coordinator.request import StopText
from actorpp.errors import ContextLengthExceededError, OverloadedError
from actorpp.serving.activity import Activity
from actorpp.serving.api import (
    ActorStats,
    EngineStats,
    Event,
    Finished,
    GenerationParams,
    OnStartup,
    PrefillStats,
    Progress,
    PromptLogprobs,
    RequestMetrics,
    StageStats,
    StartupProgress,
    Tokens,
)
from actorpp.serving.logprobs import TokenLogprob
from actorpp.serving.request import check_fits

ANSWER = "Grüße, 世界! 👩‍🚀 done"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(folder: Path, **config: Any) -> Path:
    """Write a byte-level BPE tokenizer of a few merges into ``folder``; returns its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the hat then that other thing"] * 4, trainer)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


@dataclass
class FakeCheckpoint:
    tokenizer: Path | None = None
    path: Path = Path("fake")
    vocab_size: int = 10_000


def logprob(token: int, top: int) -> TokenLogprob:
    """What the fake engine says of a token."""
    return TokenLogprob(token, -0.5 * token, 1 + token, tuple((n, -0.5 - n) for n in range(top)))


class FakeHandle:
    """One request: progress in chunks, then the engine's answer, a token at a time."""

    def __init__(
        self,
        engine: FakeEngine,
        id: str,
        prompt_ids: Sequence[int],
        params: GenerationParams,
        stop_text: StopText | None,
    ) -> None:
        self.engine, self.id, self.prompt_ids, self.params = engine, id, list(prompt_ids), params
        self.stop_text = stop_text
        self.aborted = asyncio.Event()
        self.finished = False

    def abort(self) -> None:
        self.aborted.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        self.engine.running.add(self)
        try:
            async for event in self._events():
                yield event
        finally:
            self.finished = True
            self.engine.running.discard(self)

    async def _events(self) -> AsyncIterator[Event]:
        total = len(self.prompt_ids)
        step = max(1, total // 2)
        chunks = [min(step, total - start) for start in range(0, total, step)]
        for done in range(len(chunks)):
            await self._point("prefill")
            if self.aborted.is_set():
                yield self._end("abort", chunks)
                return
            yield Progress(sum(chunks[: done + 1]), total)
            if (top := self.params.sampling.prompt_logprobs) is not None:
                upto = sum(chunks[: done + 1])
                yield PromptLogprobs(
                    tuple(logprob(token, top) for token in self.prompt_ids[max(1, upto - chunks[done]) : upto])
                )
        answer = self.engine.answer(self.prompt_ids)
        wanted = answer[: self.params.max_tokens]
        for index, token in enumerate(wanted):
            if index == 2:
                await self._point("decode")
            if self.aborted.is_set():
                yield self._end("abort", chunks)
                return
            top = self.params.sampling.logprobs
            yield Tokens((token,), () if top is None else (logprob(token, top),))
            if token in self.params.stop_token_ids or (self.stop_text and self.stop_text.reaches_stop(token)):
                yield self._end("stop", chunks, index + 1)
                return
        yield self._end("stop" if len(answer) <= len(wanted) else "length", chunks, len(wanted))

    async def _point(self, name: str) -> None:
        """A named point at which the test may hold the request; ends at once when that is aborted."""
        if self.engine.failure is not None:
            raise self.engine.failure
        await self.engine.at(name, or_when=self.aborted)
        if self.engine.failure is not None:
            raise self.engine.failure

    def _end(self, reason: Any, chunks: list[int], tokens: int = 0) -> Finished:
        metrics = RequestMetrics(
            ttft_s=0.5,
            e2e_s=1.0,
            prefill_tok_s=sum(chunks) / 0.5,
            tpot_s=0.01 if tokens > 1 else None,
            chunks=tuple(chunks),
            stage_busy=(0.9, 0.8),
        )
        return Finished(reason, metrics)


@dataclass
class FakeEngine:
    """Holds at the points named in ``hold`` ("startup", "prefill", "decode") until ``release``; see ``reached``."""

    config: EngineConfig
    on_startup: OnStartup | None = None
    trace: bool = False
    answer: Callable[[list[int]], list[int]] = lambda prompt_ids: [7, 8, 9]
    checkpoint: FakeCheckpoint = field(default_factory=FakeCheckpoint)
    context_length: int = 512
    num_stages: int = 2
    capacity: int = 64
    hold: frozenset[str] = frozenset()
    failure: Exception | None = None
    submitted: list[FakeHandle] = field(default_factory=list)
    running: set[FakeHandle] = field(default_factory=set)
    traces: list[Path] = field(default_factory=list)
    located: bool = False
    closed: bool = False
    stalled_s: float = 0.0
    state: EngineState = "ready"
    restarts: int = 0

    def __post_init__(self) -> None:
        self.activity = Activity(self.num_stages)
        self.released = asyncio.Event()
        self.reached: dict[str, asyncio.Event] = {
            name: asyncio.Event() for name in ("startup", "prefill", "decode", "idle")
        }
        self._failed = asyncio.Event()

    async def at(self, name: str, or_when: asyncio.Event | None = None) -> None:
        self.reached[name].set()
        if name not in self.hold:
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self.released, self._failed, or_when) if event]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def release(self) -> None:
        self.released.set()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self._failed.set()

    async def __aenter__(self) -> FakeEngine:
        if self.on_startup is not None:
            for done in range(3):
                self.on_startup(StartupProgress(phase="load", done=done, total=2, unit="stages"))
        await self.at("startup")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.closed = True

    async def locate(self) -> None:
        self.located = True

    def submit(
        self, prompt_ids: Sequence[int], params: GenerationParams, stop_text: StopText | None = None
    ) -> FakeHandle:
        check_fits(prompt_ids, params, self.checkpoint.vocab_size, self.context_length)
        if len(self.running) >= self.capacity:
            raise OverloadedError("the queue is full")
        handle = FakeHandle(self, f"r{len(self.submitted)}", prompt_ids, params, stop_text)
        self.submitted.append(handle)
        return handle

    def plan(self, prompt_tokens: int) -> ChunkPlan:
        if prompt_tokens >= self.context_length:
            raise ContextLengthExceededError(f"{prompt_tokens} over {self.context_length}", param="prompt")
        chunks = (prompt_tokens - prompt_tokens // 2, prompt_tokens // 2)
        return ChunkPlan(
            prompt_tokens=prompt_tokens,
            chunks=chunks,
            predicted_chunk_s=((0.25, 0.5), (0.5, 0.5)),
            predicted_ttft_s=1.5,
            predicted_done_s=(0.75, 1.5),
        )

    def stats(self) -> EngineStats:
        stage = StageStats(layers=(0, 1), pid=1, busy=0.5, weight_bytes=1, kv_bytes=1, restarts=self.restarts)
        return EngineStats(
            state=self.state,
            uptime_s=1.0,
            requests_running=len(self.running),
            requests_waiting=0,
            requests_finished=len(self.submitted) - len(self.running),
            prompt_tokens=0,
            generated_tokens=0,
            steps=0,
            steps_in_flight=0,
            window=4,
            pages_used=0,
            pages_total=64,
            page_size=16,
            stages=(stage, stage),
            stalled_s=self.stalled_s,
        )

    def prefills(self) -> list[PrefillStats]:
        return [PrefillStats(handle.id, 1, len(handle.prompt_ids), 1.0, 2.0) for handle in self.running]

    def cost_model(self) -> CostModel:
        return CostModel((StageCost(1, 2, 3, 4),) * self.num_stages, in_seconds=False)

    def actors(self) -> list[ActorStats]:
        return [ActorStats("coordinator", 0, {"outputs": 2})]

    async def failed(self) -> None:
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    async def write_trace(self, path: Path) -> None:
        self.traces.append(path)
        path.write_text("[]")  # noqa: ASYNC240 - a few bytes, in a test

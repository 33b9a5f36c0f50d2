"""StageHost: what a stage process keeps while it lives: weights, KV arena, and the state of admitted requests.

It applies log entries in the order it is given them and decides nothing; sessions, links and epochs are not its
business. ``load``, ``allocate``, ``admit``, ``launch`` and ``reset`` belong to the compute thread; ``fetch`` waits,
and may be called from another one. On CUDA the model runs on a forward stream and host copies on a
copy stream; on CPUs the same code runs without streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from actorpp.errors import CheckpointError, ConfigError, ProtocolError
from actorpp.stages.backend_choice import choose_backend
from actorpp.stages.exhaustion import Part, Rows, compute_in_memory
from actorpp.stages.fused import fusing
from actorpp.stages.kv import KVArena, PageTable
from actorpp.stages.loader import LoadedModel, load_stage_model
from actorpp.stages.logprobs import TokenLogprobs, output_logprobs, prompt_logprobs, prompt_rows
from actorpp.stages.memory import kv_bytes_available
from actorpp.stages.messages import Admit, FromOutput, Logprobs, Output, Segment, Step
from actorpp.stages.packed import PackedCache, ProbeCache
from actorpp.stages.plain import PlainModel, recognised
from actorpp.stages.request import Request
from actorpp.stages.sampler import SampleRow, needs_history, processors, sample
from actorpp.stages.spec import StageSpec
from actorpp.stages.streams import Streams

Progress = Callable[[str, int, int], None]


@dataclass
class Launched:
    """One step's result, possibly still being computed on the device.

    Attributes:
        hidden: (T, hidden_size) contiguous hidden states for the next stage; None on the last.
        start: ``time.monotonic()`` when the step began.
        end: When it ended; on CUDA on the last stage right only after ``fetch``, elsewhere when it was queued.
        sampled: (2, R) int64 on the device: ids, and whether their logits were broken; None if nothing was sampled.
        rids: Request of each of the R ids.
        failures: On the last stage: requests of this step that have failed on it by themselves, with the reason.
        wanted: Log-probabilities of the sampled ids, and of prompt tokens, on the device; None where nobody asked.
        mark: What ``Streams.finish`` returned for this step.
        logprobs, prompt_logprobs: As in Output; filled in by ``fetch``.
    """

    hidden: torch.Tensor | None
    start: float
    end: float
    sampled: torch.Tensor | None
    rids: tuple[int, ...]
    failures: dict[int, str]
    wanted: tuple[TokenLogprobs | None, TokenLogprobs | None]
    mark: Any
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)

    @property
    def on_host(self) -> bool:
        """Whether ``fetch`` has nothing to wait for."""
        return self.mark is None


class StageHost:
    """The compute side of one stage; see the module's text for threads and order."""

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self._streams: Streams  # from ``load`` on
        self._backend = choose_backend(spec.attention_backend, self.device)
        self._requests: dict[int, Request] = {}
        self._threads_set = threading.local()
        self._loaded: LoadedModel | None = None
        self._plain: PlainModel | None = None
        self._arena: KVArena | None = None
        self._received: torch.Tensor | None = None
        self._began: float | None = None

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds ids."""
        return self.spec.is_first

    @property
    def is_last(self) -> bool:
        """Whether this stage samples."""
        return self.spec.is_last

    @property
    def model(self) -> Any:
        """The loaded transformers model with its pass-throughs."""
        if self._loaded is None:
            raise RuntimeError("the stage's model is not loaded")
        return self._loaded.model

    @property
    def arena(self) -> KVArena:
        """The KV arena; it knows its page size in bytes from ``load`` on."""
        if self._arena is None:
            raise RuntimeError("the stage's model is not loaded")
        return self._arena

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the weights that this stage materialised."""
        return self._loaded.loaded_bytes if self._loaded else 0

    @property
    def kv_bytes_per_page(self) -> int:
        """Bytes of one KV page over this stage's own layers."""
        return self.arena.bytes_per_page

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between stages."""
        return int(self.model.config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states and the KV pages."""
        return self.arena.dtype

    @property
    def forward_stream(self) -> torch.cuda.Stream | None:
        """The stream that makes and reads hidden states; None on a CPU."""
        return self._streams.forward_stream

    @property
    def num_requests(self) -> int:
        """Requests admitted and not yet retired."""
        return len(self._requests)

    # --- set-up --------------------------------------------------------------------------------------------------

    def load(self, progress: Progress | None = None) -> None:
        """Load the weights, and learn the KV shapes by running two tokens through the layers.

        Raises:
            ConfigError: There is no such device.
            UnsupportedModelError: The model needs what this version does not compute.
            CheckpointError: The checkpoint is damaged.
        """
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise ConfigError(f"device {self.spec.device}: torch finds {found} CUDA devices here", param="device")
        self._streams = Streams(self.device)
        tell = progress or (lambda phase, done, total: None)
        self._use_threads()
        tell("load", 0, 1)
        loaded = load_stage_model(self.spec)
        if not self.is_first:
            loaded.layers[0].register_forward_pre_hook(self._swap_in)
        self._loaded = loaded
        probe = ProbeCache(2)
        width, dtype = self.hidden_size, loaded.model.dtype
        hidden = None if self.is_first else torch.zeros(2, width, dtype=dtype, device=self.device)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device) if self.is_first else None
        with torch.inference_mode():
            with fusing(loaded.layers):
                self.forward(ids, hidden, torch.arange(2, device=self.device)[None], probe, None)
            self._plain = recognised(loaded, self.spec, self.forward, self._backend)
        if sorted(probe.shapes) != list(range(self.spec.lo, self.spec.hi)):
            raise CheckpointError(f"layers {sorted(probe.shapes)} ran, but the stage has {self.spec.lo}-{self.spec.hi}")
        self._arena = KVArena(probe.shapes, self.spec.page_size, dtype, self.device)
        tell("load", 1, 1)

    def max_pages(self, *, kv_tokens: int | None = None, mem_fraction_static: float = 0.8) -> int:
        """KV pages that this stage can hold.

        Args:
            kv_tokens: Tokens asked for explicitly; else memory decides.
            mem_fraction_static: Share of the device's memory for weights and pages together.

        Returns:
            Pages, at most what ``max_running_requests`` of full length could use.

        Raises:
            ConfigError: Not even one page fits.
        """
        if kv_tokens is not None:
            pages, param = kv_tokens // self.spec.page_size, "kv_tokens"
        else:
            room = kv_bytes_available(self.device, mem_fraction_static, self.spec.colocated)
            pages, param = room // self.kv_bytes_per_page, "mem_fraction_static"
            useful = -(-self.spec.context_length // self.spec.page_size) * self.spec.max_running_requests
            pages = min(pages, useful)
        if pages < 1:
            raise ConfigError(
                f"stage {self.spec.stage} has no room for one KV page of {self.spec.page_size} tokens", param=param
            )
        return pages

    def allocate(self, num_pages: int) -> None:
        """Reserve the KV arena: pages 0 to ``num_pages``."""
        self.arena.allocate(num_pages)

    def reset(self) -> None:
        """End of an epoch: forget every request. Weights and arena stay."""
        self._requests.clear()

    # --- the log -------------------------------------------------------------------------------------------------

    def admit(self, entry: Admit) -> None:
        """Take in a request's parameters, pages and ids.

        Raises:
            ProtocolError: The request is known already, or a page does not exist.
        """
        if entry.rid in self._requests:
            raise ProtocolError(f"request {entry.rid} was admitted twice")
        if entry.pages and not 0 <= min(entry.pages) <= max(entry.pages) < self.arena.num_pages:
            raise ProtocolError(f"request {entry.rid} names pages outside 0-{self.arena.num_pages - 1}")
        request = Request(entry.prompt_len, entry.sampling, PageTable(entry.pages, self.spec.page_size))
        if entry.tokens:
            request.tokens = torch.frombuffer(bytearray(entry.tokens), dtype=torch.int32).long()
            vocab = int(self.model.config.vocab_size)
            if not 0 <= int(request.tokens.min()) <= int(request.tokens.max()) < vocab:
                request.failure = f"token ids must lie in 0-{vocab - 1}"
                request.tokens.clamp_(0, vocab - 1)
        if self.is_last:
            request.processors = processors(entry.sampling, entry.prompt_len, self.device)
        reads_tokens = needs_history(entry.sampling) or entry.sampling.prompt_logprobs is not None
        if self.is_last and reads_tokens and request.tokens is None:
            raise ProtocolError(f"request {entry.rid} needs its prompt, but no ids came to the last stage")
        if self.is_last and needs_history(entry.sampling) and request.tokens is not None:
            request.history = torch.zeros(request.table.capacity + 1, dtype=torch.int64, device=self.device)
            request.history[: len(request.tokens)] = request.tokens
        self._requests[entry.rid] = request

    def launch(self, step: Step, hidden: torch.Tensor | None, outputs: Mapping[int, Output]) -> Launched:
        """Compute one step.

        Args:
            hidden: (T, hidden_size) from the previous stage, on any device; None on the first.
            outputs: By seq, the outputs that the step's ``FromOutput`` inputs name; used on the first stage.

        Raises:
            ProtocolError: The step does not follow from the log so far.
        """
        self._began = time.monotonic()
        try:
            return self._compute(step, hidden, outputs)
        finally:
            self._began = None

    @property
    def computing_s(self) -> float:
        """Seconds that the step under way has taken so far; 0 without one. Read from another thread than computes."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _compute(self, step: Step, hidden: torch.Tensor | None, outputs: Mapping[int, Output]) -> Launched:
        self._use_threads()
        self._retire(step.retire)
        start = time.monotonic()
        parts: list[Part] = []
        for segment in step.segments:
            request = self._requests.get(segment.rid)
            if request is None or segment.start != request.computed:
                raise ProtocolError(f"step {step.seq} continues request {segment.rid} where it is not")
            request.computed += segment.length
            parts.append((request.table, segment.start, segment.length))
        if (hidden is None) != self.is_first or (hidden is not None and hidden.shape[0] != step.num_tokens):
            raise ProtocolError(f"the hidden states do not fit step {step.seq} of {step.num_tokens} tokens")
        sampling = [segment for segment in step.segments if segment.sample] if self.is_last else []
        with torch.inference_mode(), self._streams.forward() as begun:
            ids = self._input_ids(step, outputs).to(self.device, non_blocking=True) if self.is_first else None
            if hidden is not None:
                self._streams.hold(hidden)
                hidden = hidden.to(self.device, self.dtype, non_blocking=True)
            rows = [*step.sampling_rows, *prompt_rows(step, self._requests)] if self.is_last else None
            out = compute_in_memory(self, self._requests, step, parts, ids, hidden, rows)
            sampled = self._sample(sampling, out[: len(sampling)]) if sampling else None
            wanted = (
                output_logprobs(sampling, self._requests, out, sampled[0]) if sampled is not None else None,
                prompt_logprobs(step, self._requests, out[len(sampling) :]) if rows else None,
            )
            mark = self._streams.finish(begun)
        return Launched(
            hidden=None if self.is_last else out,
            start=start,
            end=time.monotonic(),
            sampled=sampled,
            rids=tuple(segment.rid for segment in sampling),
            wanted=wanted,
            failures={s.rid: why for s in step.segments if self.is_last and (why := self._requests[s.rid].failure)},
            mark=mark,
        )

    def fetch(self, launched: Launched) -> tuple[tuple[int, ...], dict[int, str]]:
        """Wait for a step's sampled ids and log-probabilities.

        Returns:
            The ids of its sampling segments in order, and for requests whose own computation failed the reason;
            a failed request's id means nothing.
        """
        ids: tuple[int, ...] = ()
        errors = dict(launched.failures)
        if launched.sampled is not None:
            picked, broken = self._streams.to_host(launched.sampled, launched.mark).tolist()
            ids = tuple(picked)
            for rid, bad in zip(launched.rids, broken, strict=True):
                if bad:
                    errors.setdefault(rid, "the model's logits are not finite")
        launched.logprobs, launched.prompt_logprobs = (
            {} if rows is None else rows.by_request(lambda tensor: self._streams.to_host(tensor, launched.mark))
            for rows in launched.wanted
        )
        launched.end = self._streams.end_time(launched.start, launched.end, launched.mark)
        return ids, errors

    # --- inside --------------------------------------------------------------------------------------------------

    def _retire(self, rids: tuple[int, ...]) -> None:
        gone = [self._requests.pop(rid) for rid in rids if rid in self._requests]
        if self.spec.poison_freed and gone:
            held = {page for request in self._requests.values() for page in request.table.pages}
            with torch.inference_mode():
                self.arena.poison({page for request in gone for page in request.table.pages} - held)

    def _input_ids(self, step: Step, outputs: Mapping[int, Output]) -> torch.Tensor:
        """(1, T) ids of the step's segments."""
        ids = np.empty(step.num_tokens, dtype=np.int64)  # faster than torch at single numbers
        for segment, own in zip(step.segments, step.token_ranges, strict=True):
            match segment.token:
                case None:
                    tokens = self._requests[segment.rid].tokens
                    if tokens is None or len(tokens) < segment.start + segment.length:
                        raise ProtocolError(f"step {step.seq} goes past the ids of request {segment.rid}")
                    ids[own.start : own.stop] = tokens[segment.start : segment.start + segment.length].numpy()
                case FromOutput(seq, index):
                    if seq not in outputs or index >= len(outputs[seq].ids):
                        raise ProtocolError(f"step {step.seq} needs output {seq}, which is not here")
                    ids[own.start : own.stop] = outputs[seq].ids[index]
                case literal:
                    ids[own.start : own.stop] = literal
        return torch.from_numpy(ids)[None]

    def forward(
        self,
        ids: torch.Tensor | None,
        hidden: torch.Tensor | None,
        positions: torch.Tensor,
        cache: PackedCache,
        rows: Rows,
    ) -> torch.Tensor:
        """Run the local layers: hidden states (T, hidden_size), or logits (len(rows), vocab) of ``rows``.

        What the last stage gives without rows means nothing.
        """
        if self._plain is not None:
            return self._plain(ids, hidden, positions, cache, rows, self._backend)
        model = self.model
        self._received = None if hidden is None else hidden[None]
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "inputs_embeds": self._received,
            "position_ids": positions,
            "cache": cache,
            "use_cache": True,
            "packed": cache,
            "backend": self._backend,
        }
        if rows:
            keep = torch.tensor(rows, device=self.device)
            logits: torch.Tensor = model(**arguments, logits_to_keep=keep).logits[0]
            return logits
        base = getattr(model, model.base_model_prefix)
        last: torch.Tensor = base(**arguments).last_hidden_state[0]
        return last.contiguous()

    def _swap_in(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pre-hook of the first local layer: whatever the model did to the received hidden states is undone."""
        return (self._received, *args[1:])

    def _sample(self, segments: list[Segment], logits: torch.Tensor) -> torch.Tensor:
        """(2, R) ids and broken flags for the sampling segments."""
        rows = []
        for segment in segments:
            request, end = self._requests[segment.rid], segment.start + segment.length
            history = None if request.history is None else request.history[:end]
            rows.append(SampleRow(request.sampling, request.processors, end - request.prompt_len, history))
        ids, broken = sample(logits, rows)
        for index, segment in enumerate(segments):
            request, end = self._requests[segment.rid], segment.start + segment.length
            if request.history is not None and request.tokens is not None and end >= len(request.tokens):
                request.history[end] = ids[index]
        return torch.stack((ids, broken.long()))

    def _use_threads(self) -> None:
        """Set torch's threads for the calling thread, once: they are a property of the thread that computes."""
        if not getattr(self._threads_set, "done", False):
            torch.set_num_threads(self.spec.threads)
            with suppress(RuntimeError):  # once per process, and not after another user of torch began
                torch.set_num_interop_threads(1)
            self._threads_set.done = True

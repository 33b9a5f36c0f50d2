"""``python -m tests.faults.epochs``: what an epoch leaves behind in a stage process that lives on.

Three stages live in this process, as ``actorpp.stages.process`` runs them, with gloo between them, under a driver of a
few lines. Epoch after epoch they meet, compute, and are fenced with steps in flight; every other time a link breaks
first. Printed at the end, as JSON: what is alive of the epochs' objects, though Python's own collector never ran; the
dead letters that are kept; the allocator's arenas; and how much the heap in use and resident memory grew with each
epoch after the first ten.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import struct
import sys
from collections import Counter
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import psutil

from actorpp.coordinator.ports import MALLOC
from actorpp.errors import TransportError
from actorpp.eventloop import new_event_loop
from actorpp.logs import configure_logging
from actorpp.runtime.system import live_systems
from actorpp.stages.codecs import Sender, driver_to_stage, routing_id, stage_to_driver
from actorpp.stages.imports import import_lightly
from actorpp.stages.messages import (
    Admit,
    DriverToStage,
    Fence,
    Fenced,
    Hello,
    Loaded,
    Output,
    Ready,
    SamplingParams,
    Segment,
    Shutdown,
    StageToDriver,
    Step,
    Topology,
)
from actorpp.stages.spec import StageSpec
from actorpp.stages.wiring import WiringSpec
from actorpp.transport.sockets import Router

STAGES = 3
REQUESTS = 3
CHUNK = 32
CHUNKS = 4  # of each request, of which the last two are in flight when the fence comes
PAGE = 64
SETTLED = 10
"""Epochs in which pools and caches fill."""

OF_AN_EPOCH = ("Cell", "GlooLink", "P2PWork", "StageSession", "_Waiter")

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": STAGES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}


class Driver:
    """The other end of the stages' sockets."""

    def __init__(self, folder: Path) -> None:
        self._encoder, self._decoder = driver_to_stage(), stage_to_driver()
        self._news: asyncio.Queue[StageToDriver] = asyncio.Queue()
        self.router = Router(
            f"ipc://{folder}/driver",
            lambda peer, frames: self._news.put_nowait(self._decoder.decode(frames).message),
            lambda peer, frames, reason: None,
            outbox=256,
            limits=self._decoder.limits,
        )

    def send(self, message: DriverToStage) -> None:
        """To every stage."""
        for stage in range(STAGES):
            self.router.send(routing_id(stage, 0).encode(), self._encoder.encode(message, Sender("driver")))

    async def wait_for(self, kind: type[StageToDriver], count: int = STAGES) -> list[Any]:
        """The next messages of this kind; the others are of no interest."""
        found: list[StageToDriver] = []
        while len(found) < count:
            if isinstance(message := await self._news.get(), kind):
                found.append(message)
        return found

    async def epoch(self, number: int, inlets: tuple[str, ...], folder: Path) -> None:
        """As far as the last two rounds of chunks, which nobody waits for."""
        pages = REQUESTS * CHUNKS * CHUNK // PAGE
        self.send(Topology(number, pages, REQUESTS * CHUNKS, inlets, f"file://{folder}/store-{number}"))
        await self.wait_for(Ready)
        length, own = CHUNKS * CHUNK, pages // REQUESTS
        ids = struct.pack(f"<{length}i", *range(5, 5 + length))
        for rid in range(REQUESTS):
            self.send(Admit(number, rid, rid, length, SamplingParams(), tuple(range(rid * own, (rid + 1) * own)), ids))
        for step in range(REQUESTS * CHUNKS):
            chunk, rid = divmod(step, REQUESTS)
            self.send(Step(number, REQUESTS + step, rid, (Segment(rid, chunk * CHUNK, CHUNK),)))
        await self.wait_for(Output, REQUESTS * (CHUNKS - 2))


class Heap:
    """What glibc's allocator says of itself."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        with NamedTemporaryFile() as file:
            stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
            libc.malloc_info(0, stream)
            libc.fclose(stream)
            told = ElementTree.fromstring(file.read())
        taken, free = (
            sum(int(size.attrib["size"]) for size in told.findall(f"heap/{sizes}"))
            for sizes in ("system[@type='current']", "total")
        )
        self.arenas, self.used = len(told.findall("heap")), taken - free


async def main(epochs: int, folder: Path) -> dict[str, object]:
    from actorpp.stages import process

    links: dict[int, Any] = {}

    async def connect(url: str, epoch: int, rank: int, *rest: Any, **options: Any) -> Any:
        links[rank] = await connect_gloo(url, epoch, rank, *rest, **options)
        return links[rank]

    connect_gloo = process.connect_gloo
    driver, this = Driver(folder), psutil.Process()
    (folder / "config.json").write_text(json.dumps(MODEL))
    with patch.object(process, "connect_gloo", connect):
        stages = []
        for stage in range(STAGES):
            own = {"stage": stage, "num_stages": STAGES, "lo": stage, "hi": stage + 1}
            spec = StageSpec(**own, model_path=str(folder), load_format="dummy", page_size=PAGE, kv_tokens=4096)
            wiring = WiringSpec(driver=driver.router.endpoint, run_dir=str(folder))
            stages.append(asyncio.create_task(process.serve(spec, wiring)))
        inlets = tuple(hello.inlet for hello in sorted(await driver.wait_for(Hello), key=lambda hello: hello.stage))
        await driver.wait_for(Loaded)
        gc.freeze()  # as a stage process does; and what was there before is none of an epoch
        gc.disable()
        for number in range(epochs):
            if number == SETTLED:
                before, resident = Heap(), this.memory_info().rss
            await driver.epoch(number, inlets, folder)
            if number % 2:
                links[1]._fail(TransportError("as if its peer had gone"))
            links.clear()
            driver.send(Fence(number))
            await driver.wait_for(Fenced)
        after, grown = Heap(), this.memory_info().rss - resident
        kinds = Counter(type(each).__name__ for each in gc.get_objects())
        letters = sum(len(system.dead_letters.recent) for system in live_systems)
        driver.send(Shutdown())
        await asyncio.gather(*stages)
        await driver.router.close()
    return {
        "alive": {kind: kinds[kind] for kind in OF_AN_EPOCH},
        "letters": letters,
        "arenas": after.arenas,
        "heap_bytes_per_epoch": round((after.used - before.used) / (epochs - SETTLED)),
        "resident_bytes_per_epoch": round(grown / (epochs - SETTLED)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.faults.epochs")
    parser.add_argument("--epochs", type=int, default=200, help="more than ten")
    chosen = parser.parse_args()
    if MALLOC.items() - os.environ.items():  # the allocator reads its settings when the process starts
        os.environ.update(MALLOC)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    configure_logging("critical")
    import_lightly("cpu")
    with TemporaryDirectory(prefix="epochs-") as name, asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(main(chosen.epochs, Path(name)))), flush=True)
    os._exit(0)  # as a stage process does

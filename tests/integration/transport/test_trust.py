"""What keeps strangers out: loopback only, no code in messages, and imports that stay small."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorpp.transport.sockets import Router

Run = Callable[[Any], None]
ROOT = Path(__file__).parents[3]
LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def listeners(pid: int) -> set[str]:
    """The local addresses, as in /proc, on which a process listens."""
    descriptors = Path(f"/proc/{pid}/fd")
    inodes = set()
    for entry in descriptors.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the listing
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and rest[5] in inodes:
                found.add(local.partition(":")[0])
    return found


def test_every_listener_is_on_loopback(run_once: Run, start: Any, tmp_path: Path) -> None:
    async def main() -> None:
        router = Router("tcp://127.0.0.1:*", print, print)
        async with start() as program:
            running = [program("gloo_rank", f"file://{tmp_path}/store", 1, rank, 2, "wait") for rank in range(2)]
            for rank in running:
                await rank.says("connected")
            for rank in running:
                found = await asyncio.to_thread(listeners, rank.child.pid)
                assert found <= LOOPBACK
                assert found  # gloo does listen: the table was read
            assert await asyncio.to_thread(listeners, os.getpid()) <= LOOPBACK
        await router.close()

    run_once(main())


def test_nothing_in_the_package_can_run_what_it_receives() -> None:
    """Modules and calls that load code from bytes; docstrings may name them."""
    modules = "pickle|cPickle|_pickle|marshal|shelve|dill|cloudpickle|joblib"
    uses = [
        rf"\b(import|from) ({modules})\b",
        rf"\b({modules})\.\w",
        r"\.(recv|send)_(pyobj|serialized)\b",
        r"(gather|broadcast|scatter|send|recv)_object(_list|s)?\(",  # torch.distributed's collectives of objects
        r"(?<![.\w])(eval|exec)\(",
        r"\b(torch|yaml|numpy|np)\.(load|unsafe_load|full_load)\(",
    ]
    pattern = re.compile("|".join(uses))
    assert all(pattern.search(code) for code in ("import pickle", "s.recv_pyobj()", "all_gather_object(", "eval(x)"))
    found = []
    for folder in ("actorpp", "stages", "transport", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                code = line.partition("#")[0]
                if pattern.search(code):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize("module", ["", ".wire", ".addresses", ".sockets", ".process"])
def test_the_driver_gets_by_without_torch(module: str) -> None:
    code = f"import sys, actorpp.transport{module}; assert not {{'torch', 'transformers', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd="/")


def test_nccl_can_be_imported_everywhere_and_says_what_it_needs(run_once: Run) -> None:
    import torch

    from actorpp.errors import ConfigError
    from actorpp.transport.nccl import connect_nccl

    async def main() -> None:
        with pytest.raises(ConfigError, match="between CUDA devices, this stage runs on cpu"):
            await connect_nccl("file:///nowhere", 1, 0, 2, device=torch.device("cpu"), on_failure=print)

    run_once(main())


def test_the_folder_is_no_package_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", "import transport"], cwd=ROOT, capture_output=True, text=True)
    assert "import actorpp.transport, not transport" in done.stderr

"""Tensors between processes over gloo: what it does well, and what is done about what it does badly."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from actorpp.errors import ConfigError, ProtocolError, TransportError
from actorpp.transport.gloo import connect_gloo
from actorpp.transport.links import abandoned_waiters
from actorpp.transport.rendezvous import host_store
from actorpp.transport.streams import NullStreams

Run = Callable[[Any], None]


@pytest.fixture(scope="module", autouse=True)
def _signal_pipe_of_libuv() -> None:
    """The first store of a process opens a pipe that stays; no test is to be blamed for it."""
    host_store()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store-1"


def ranks(program: Any, url: str, size: int, *args: object) -> list[Any]:
    return [program("gloo_rank", url, 1, rank, size, *args) for rank in range(size)]


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_three_ranks_mixed_shapes_and_dtypes(run_once: Run, start: Any, url: str, kind: str) -> None:
    async def main() -> None:
        store, tcp_url = host_store()
        async with start() as program:
            running = ranks(program, url if kind == "file" else tcp_url, 3, "mixed")
            for rank in running:
                # No waiter; for Python and for the system the main thread and the liveness watcher: gloo's have gone.
                assert await rank.says("closed") == "0 2 2", rank.lines
            assert [await rank.child.wait() for rank in running] == [0, 0, 0]
        del store

    run_once(main())


def test_a_killed_peer_frees_the_waiter(run_once: Run, start: Any, url: str) -> None:
    async def main() -> None:
        async with start() as program:
            sender, receiver = (program("gloo_rank", url, 1, i, 2, what) for i, what in enumerate(["wait", "receive"]))
            for rank in (sender, receiver):
                await rank.says("connected")
            sender.child.kill()
            assert "receive 0 failed" in await receiver.says("failed")
            assert await receiver.says("closed") == "0"
            assert await receiver.child.wait() == 0

    run_once(main())


@pytest.mark.parametrize("what", ["receive", "send"])
def test_a_stopped_peer_meets_the_deadline(run_once: Run, start: Any, url: str, what: str) -> None:
    async def main() -> None:
        async with start() as program:
            roles = ["wait", "receive"] if what == "receive" else ["send", "wait"]
            both = [program("gloo_rank", url, 1, i, 2, role, 1.0) for i, role in enumerate(roles)]
            waiting, stopped = (both[1], both[0]) if what == "receive" else (both[0], both[1])
            await stopped.says("connected")
            stopped.child.send_signal(signal.SIGSTOP)
            assert await waiting.says("failed") == f"{what} 0 made no progress within 1 s"
            assert await waiting.says("closed") == "1"  # abandoned, counted
            assert await waiting.child.wait() == 0  # and no hindrance to the exit

    run_once(main())


@pytest.mark.parametrize("sent", [999, 1001])
def test_a_length_that_disagrees_is_a_failure_and_never_a_short_tensor(
    run_once: Run, start: Any, url: str, sent: int
) -> None:
    async def main() -> None:
        async with start() as program:
            running = ranks(program, url, 2, "length", 1.0, sent)
            for rank, what in zip(running, ("send", "receive"), strict=True):
                assert await rank.says("failed") == f"{what} 0 made no progress within 1 s"
            assert [await rank.child.wait() for rank in running] == [0, 0]  # nor does gloo end the process

    run_once(main())


def test_a_new_epoch_works_while_an_old_waiter_hangs(run_once: Run, start: Any) -> None:
    async def main() -> None:
        store, url = host_store()
        async with start() as program:
            running = ranks(program, url, 2, "replace", 1.0)
            assert await running[1].says("failed") == "receive 0 made no progress within 1 s"
            assert await running[1].says("closed") == "1"
            for rank in running:
                await rank.says("replaced")
            assert [await rank.child.wait() for rank in running] == [0, 0]
        del store

    run_once(main())


def test_ranks_that_do_not_meet(run_once: Run, url: str) -> None:
    async def main() -> None:
        with pytest.raises(TransportError, match="rank 0 of 2"):
            await connect_gloo(url, 1, 0, 2, on_failure=print, connect_timeout_s=0.2)
        assert abandoned_waiters() == 0
        # torch tries again and again, and keeps no time: its thread may have to be left to itself.
        with pytest.raises(TransportError, match=r"cannot reach the rendezvous|did not meet the others"):
            await connect_gloo("tcp://127.0.0.1:1", 1, 0, 2, on_failure=print, connect_timeout_s=0.5)
        for thread in threading.enumerate():
            if thread.name.startswith("actorpp-"):
                await asyncio.to_thread(thread.join)
        assert abandoned_waiters() == 0

    run_once(main())


def test_a_single_stage_needs_no_neighbours(run_once: Run, url: str) -> None:
    async def main() -> None:
        link = await connect_gloo(url, 1, 0, 1, on_failure=print)
        with pytest.raises(ProtocolError):
            link.post_send(0, torch.zeros(1))
        with pytest.raises(ProtocolError):
            link.post_recv(0, (1,), torch.float32)
        await link.close()
        assert abandoned_waiters() == 0

    run_once(main())


@pytest.mark.parametrize("where", [{"interface": "nope0"}, {"host": "192.0.2.1"}, {"host": "a", "interface": "lo"}])
def test_an_address_that_is_not_ours_is_refused(run_once: Run, url: str, where: dict[str, Any]) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError) as caught:
            await connect_gloo(url, 1, 0, 1, on_failure=print, **where)
        assert caught.value.param == "host"

    run_once(main())


@pytest.fixture
def _default_logs() -> Iterator[None]:
    """structlog as it is unless somebody configured it, as a program that uses an engine does."""
    before = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("_default_logs")
@pytest.mark.parametrize("where", [{}, {"host": "127.0.0.1"}, {"interface": "lo"}])
def test_the_chosen_address_is_logged(
    run_once: Run, url: str, where: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        link = await connect_gloo(url, 1, 0, 1, on_failure=print, **where)
        await link.close()

    run_once(main())
    written = capsys.readouterr()
    assert f"address={where.get('interface', '127.0.0.1')}" in written.out + written.err


class Recording(NullStreams):
    """Streams that write down what they were asked for, and copy as a device would."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, object]] = []
        self._marks = 0

    def _note(self, what: str, detail: object = None) -> None:
        self.log.append((what, threading.current_thread().name, detail))

    def mark(self) -> object:
        self._marks += 1
        self._note("mark", self._marks)
        return self._marks

    def to_host(self, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        self._note("to_host", mark)
        return tensor.clone()

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._note("host_buffer")
        return super().host_buffer(shape, dtype)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note("to_device")
        return tensor.clone()


def test_copies_wait_for_the_compute_stream_and_never_on_the_loop(
    run_once: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that CUDA needs, shown with two ranks in this process: marked when posted, copied by the waiters."""

    async def main() -> None:
        made = [Recording(), Recording()]
        unused = iter(made)
        monkeypatch.setattr("actorpp.transport.gloo.streams_for", lambda *args: next(unused))
        sender, receiver = await asyncio.gather(*(connect_gloo(url, 1, i, 2, on_failure=print) for i in range(2)))
        tensors = [torch.full((3,), float(i)) for i in range(2)]
        sends = [sender.post_send(i, tensor) for i, tensor in enumerate(tensors)]
        receives = [receiver.post_recv(i, (3,), torch.float32) for i in range(2)]
        assert all([torch.equal(await work, tensor) for work, tensor in zip(receives, tensors, strict=True)])
        assert all([await work is tensor for work, tensor in zip(sends, tensors, strict=True)])
        by_sender, by_receiver = sorted((streams.log for streams in made), key=lambda log: log[0][0] != "mark")
        assert [entry for entry in by_sender if entry[0] == "mark"] == [("mark", "MainThread", i) for i in (1, 2)]
        copies = [entry for entry in by_sender if entry[0] == "to_host"]
        assert copies == [("to_host", "actorpp-send-0", i) for i in (1, 2)]
        assert by_receiver == [(what, "actorpp-recv-1", None) for what in ("host_buffer", "to_device")] * 2
        await asyncio.gather(sender.close(), receiver.close())
        assert abandoned_waiters() == 0

    run_once(main())

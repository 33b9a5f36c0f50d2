"""Router and Dealer in one process, on both loops, with plain ZeroMQ sockets where a peer has to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from actorpp.errors import ConfigError, PeerUnreachableError
from actorpp.transport import sockets
from actorpp.transport.sockets import READ_BATCH, Dealer, Router, close_context, context
from actorpp.transport.wire import MAGIC, Limits

Run = Callable[[Any], None]
BIG = bytes(1 << 20)  # a few of these fill the kernel's buffers


class Received:
    """Collects what a socket's callbacks get, and waits for it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.dead: list[Any] = []
        self.errors: list[BaseException] = []
        self._changed = asyncio.Event()

    def message(self, *args: Any) -> None:
        self.messages.append(args)
        self._changed.set()

    def dead_letter(self, *args: Any) -> None:
        self.dead.append(args)
        self._changed.set()

    def error(self, error: BaseException) -> None:
        self.errors.append(error)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def router(bind: str, got: Received, **options: Any) -> Router:
    return Router(bind, got.message, got.dead_letter, on_error=got.error, **options)


def dealer(connect: str, got: Received, identity: bytes = b"stage-0#1", **options: Any) -> Dealer:
    return Dealer(connect, identity, got.message, got.dead_letter, on_error=got.error, **options)


@contextlib.contextmanager
def plain(kind: int, endpoint: str, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    """A foreign peer's socket."""
    socket = context().socket(kind)
    for name, value in {"RCVTIMEO": 20_000, "SNDTIMEO": 20_000, **options}.items():
        socket.set(getattr(zmq, name), value)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close(linger=0)


async def hear(got: Received, socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> bytes:
    """Has a plain peer say something; returns its routing id once the router has heard it."""
    before = len(got.messages)
    socket.send_multipart(frames)
    await got.until(lambda: len(got.messages) > before)
    routing_id: bytes = got.messages[-1][0]
    return routing_id


@pytest.fixture(params=["ipc", "tcp", "tcp6"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    tcp = {"tcp": "tcp://127.0.0.1:*", "tcp6": "tcp://[::1]:*"}
    return tcp.get(request.param, f"ipc://{tmp_path}/s")


@pytest.fixture
def ipc(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def test_both_ways_in_order(run: Run, endpoint: str) -> None:
    async def main() -> None:
        at_router, at_dealer = Received(), Received()
        listening = router(endpoint, at_router, outbox=5000)
        talking = dealer(listening.endpoint, at_dealer, outbox=5000)
        for i in range(2000):
            talking.send([b"", MAGIC, str(i).encode()])
        await at_router.until(lambda: bool(at_router.messages))
        for i in range(2000):
            listening.send(b"stage-0#1", [memoryview(str(i).encode()), b""])
        await at_router.until(lambda: len(at_router.messages) == 2000)
        await at_dealer.until(lambda: len(at_dealer.messages) == 2000)
        assert at_router.messages == [(b"stage-0#1", [b"", MAGIC, str(i).encode()]) for i in range(2000)]
        assert at_dealer.messages == [([str(i).encode(), b""],) for i in range(2000)]
        assert listening.backlog == talking.backlog == 0
        await talking.close()
        await listening.close()
        assert not at_router.dead
        assert not at_dealer.dead

    run(main())


def test_messages_stay_apart_whatever_their_number_of_frames(run: Run, ipc: str) -> None:
    async def main() -> None:
        at_router, at_dealer = Received(), Received()
        listening = router(ipc, at_router)
        talking = dealer(ipc, at_dealer)
        messages = [[str(i).encode() for i in range(count)] for count in (1, 4, 2, 7, 1, 1, 3)] + [[b""], [b"", b""]]
        for message in messages:
            talking.send(message)
        await at_router.until(lambda: len(at_router.messages) == len(messages))
        assert at_router.messages == [(b"stage-0#1", message) for message in messages]
        for message in messages:
            listening.send(b"stage-0#1", message)
        await at_dealer.until(lambda: len(at_dealer.messages) == len(messages))
        assert at_dealer.messages == [(message,) for message in messages]
        await talking.close()
        await listening.close()

    run(main())


def test_a_message_that_was_handled_is_not_kept(run: Run, ipc: str) -> None:
    async def main() -> None:
        at_router, at_dealer = Received(), Received()
        listening = router(ipc, at_router)
        talking = dealer(ipc, at_dealer)
        tracemalloc.start()
        try:
            talking.send([BIG])
            await at_router.until(lambda: bool(at_router.messages))
            listening.send(b"stage-0#1", [BIG])
            await at_dealer.until(lambda: bool(at_dealer.messages))
            at_router.messages.clear()
            at_dealer.messages.clear()
            held, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < len(BIG) <= most
        await talking.close()
        await listening.close()

    run(main())


def test_a_plain_req_client_gets_its_reply(run: Run) -> None:
    async def main() -> None:
        def answer(peer: bytes, frames: list[bytes]) -> None:
            listening.send(peer, [*frames[:3], msgpack.packb({"type": "pong"})])

        got = Received()
        listening = Router("tcp://127.0.0.1:*", answer, got.dead_letter)
        with plain(zmq.REQ, listening.endpoint) as client:
            client.send_multipart([MAGIC, msgpack.packb({"id": 1}), msgpack.packb({"type": "ping"})])
            reply = await asyncio.get_running_loop().run_in_executor(None, client.recv_multipart)
        assert reply == [MAGIC, msgpack.packb({"id": 1}), msgpack.packb({"type": "pong"})]
        await listening.close()

    run(main())


def test_an_unknown_peer_is_an_error_at_once(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()
        listening = router(ipc, got)
        with pytest.raises(PeerUnreachableError, match="no such peer is connected"):
            listening.send(b"stage-9#1", [b"", MAGIC])
        await listening.close()
        with pytest.raises(PeerUnreachableError, match="closed"):
            listening.send(b"stage-9#1", [b"", MAGIC])
        assert not got.dead

    run(main())


def fill(listening: Router, peer: bytes) -> int:
    """Sends until the peer's outbox is full; returns how many messages were taken."""
    taken = 0
    with pytest.raises(PeerUnreachableError, match="does not read: 4 messages wait"):  # noqa: PT012
        while taken < 10_000:
            listening.send(peer, [str(taken).encode(), BIG])
            taken += 1
    return taken


def test_a_peer_that_never_reads_fills_its_outbox_alone(run: Run, ipc: str) -> None:
    async def main() -> None:
        got, other = Received(), Received()
        listening = router(ipc, got, outbox=4)
        reader = dealer(ipc, other, b"reader")
        reader.send([b"hello"])
        await got.until(lambda: bool(got.messages))
        with plain(zmq.DEALER, ipc, RCVHWM=1) as deaf:
            peer = await hear(got, deaf, [b"hello"])
            taken = fill(listening, peer)
            assert listening.backlog == 4
            for i in range(50):
                listening.send(b"reader", [str(i).encode()])
            await other.until(lambda: len(other.messages) == 50)
            assert not got.dead
        await got.until(lambda: len(got.dead) == 4)  # it has gone: what it had not taken is reported, in order
        assert [frames[0] for _, frames, _ in got.dead] == [str(i).encode() for i in range(taken - 4, taken)]
        assert {(peer_, reason) for peer_, _, reason in got.dead} == {(peer, "no such peer is connected")}
        assert listening.backlog == 0
        with pytest.raises(PeerUnreachableError, match="no such peer"):
            listening.send(peer, [b"x"])
        await reader.close()
        await listening.close()

    run(main())


def test_a_slow_peer_gets_everything_in_order(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()
        listening = router(ipc, got, outbox=4)
        with plain(zmq.DEALER, ipc, RCVHWM=1) as slow:
            taken = fill(listening, await hear(got, slow, [b"hello"]))
            loop = asyncio.get_running_loop()
            numbers = [(await loop.run_in_executor(None, slow.recv_multipart))[0] for _ in range(taken)]
            assert numbers == [str(i).encode() for i in range(taken)]
            assert listening.backlog == 0
        await listening.close()
        assert not got.dead

    run(main())


def test_room_is_found_even_if_its_news_was_taken(run: Run, ipc: str) -> None:
    """As when a call for another peer takes the wake-up: here the descriptor is not watched at all."""

    async def main() -> None:
        got = Received()
        listening = router(ipc, got, outbox=4)
        with plain(zmq.DEALER, ipc, RCVHWM=1) as slow:
            taken = fill(listening, await hear(got, slow, [b"hello"]))
            loop = asyncio.get_running_loop()
            await asyncio.sleep(0)  # the look that follows a send
            loop.remove_reader(listening._fd)
            for _ in range(taken):
                await loop.run_in_executor(None, slow.recv_multipart)
        await listening.close()
        assert not got.dead

    run(main())


def test_close_reports_what_it_leaves(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()
        listening = router(ipc, got, outbox=4)
        with plain(zmq.DEALER, ipc, RCVHWM=1) as deaf:
            fill(listening, await hear(got, deaf, [b"hello"]))
            await listening.close(flush_s=0.01)
            await listening.close()
        assert [reason for _, _, reason in got.dead] == ["the socket was closed"] * 4

    run(main())


def test_close_waits_for_a_slow_peer_if_told_to(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()
        listening = router(ipc, got, outbox=4)
        with plain(zmq.DEALER, ipc, RCVHWM=1) as slow:
            taken = fill(listening, await hear(got, slow, [b"hello"]))
            closing = asyncio.create_task(listening.close(flush_s=20))
            loop = asyncio.get_running_loop()
            for _ in range(taken):
                await loop.run_in_executor(None, slow.recv_multipart)
            await closing
        assert not got.dead

    run(main())


def test_a_dealer_without_a_peer_is_bounded_too(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()
        alone = dealer(ipc, got, outbox=4)
        for i in range(sockets.SEND_MARK + 4):
            alone.send([str(i).encode()])
        with pytest.raises(PeerUnreachableError, match="does not read: 4 messages wait"):
            alone.send([b"one too many"])
        at_router = Received()
        listening = router(ipc, at_router)  # a peer that comes late gets all, in order
        await at_router.until(lambda: len(at_router.messages) == sockets.SEND_MARK + 4)
        assert [frames for _, frames in at_router.messages] == [[str(i).encode()] for i in range(68)]
        await alone.close()
        await listening.close()
        assert not got.dead

    run(main())


def test_a_callback_that_raises_is_reported_and_the_reader_goes_on(run: Run, ipc: str) -> None:
    async def main() -> None:
        got, errors = Received(), Received()

        def picky(peer: bytes, frames: list[bytes]) -> None:
            if frames == [b"bad"]:
                raise ValueError("picky")
            got.message(frames)

        listening = Router(ipc, picky, got.dead_letter, on_error=errors.error)
        talking = dealer(ipc, got)
        for frame in (b"one", b"bad", b"two"):
            talking.send([frame])
        await got.until(lambda: len(got.messages) == 2)
        assert got.messages == [([b"one"],), ([b"two"],)]
        assert [str(error) for error in errors.errors] == ["picky"]
        await talking.close()
        await listening.close()

    run(main())


def test_by_default_the_loop_reports_what_a_callback_raised(run: Run, ipc: str) -> None:
    async def main() -> None:
        reports = Received()
        asyncio.get_running_loop().set_exception_handler(lambda loop, report: reports.message(report))

        def broken(peer: bytes, frames: list[bytes]) -> None:
            raise ValueError("broken")

        listening = Router(ipc, broken, reports.dead_letter)
        talking = dealer(ipc, reports)
        talking.send([b"x"])
        await reports.until(lambda: bool(reports.messages))
        assert str(reports.messages[0][0]["exception"]) == "broken"
        await talking.close()
        await listening.close()

    run(main())


def test_a_callback_may_close_the_socket(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()

        def leave(peer: bytes, frames: list[bytes]) -> None:
            got.message(frames)
            with contextlib.suppress(StopIteration):
                listening.close().send(None)  # without a flush it has nothing to wait for

        listening = Router(ipc, leave, got.dead_letter, on_error=got.error)
        talking = dealer(ipc, got)
        for _ in range(3):
            talking.send([b"x"])
        await got.until(lambda: bool(got.messages))
        assert listening.closed
        assert len(got.messages) == 1
        assert not got.errors
        await talking.close()

    run(main())


def test_a_flood_does_not_hold_the_loop(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()
        seen_at_turn: list[int] = []
        loop = asyncio.get_running_loop()

        def count(peer: bytes, frames: list[bytes]) -> None:
            if not got.messages:
                loop.call_soon(lambda: seen_at_turn.append(len(got.messages)))
            got.message(frames)

        listening = Router(ipc, count, got.dead_letter)
        with plain(zmq.DEALER, ipc) as flood:
            for _ in range(10 * READ_BATCH):
                flood.send(b"x")
            await got.until(lambda: len(got.messages) == 10 * READ_BATCH)
        assert seen_at_turn[0] <= 2 * READ_BATCH  # a wake-up and a second look may share a turn
        await listening.close()

    run(main())


def test_a_deadline_on_the_mailbox_loses_nothing(run: Run, ipc: str) -> None:
    """The reader only fills the mailbox; a deadline that passes while a message comes in ends a wait, not a receive."""

    async def main() -> None:
        mailbox: asyncio.Queue[bytes] = asyncio.Queue()
        got = Received()
        listening = Router(ipc, lambda peer, frames: mailbox.put_nowait(frames[0]), got.dead_letter)
        talking = dealer(ipc, got, outbox=3000)
        taken: list[int] = []
        missed = 0
        for i in range(3000):
            talking.send([str(i).encode()])
            try:
                async with asyncio.timeout(0):  # over as soon as it has to wait at all
                    taken.append(int(await mailbox.get()))
            except TimeoutError:
                missed += 1
        while len(taken) < 3000:
            taken.append(int(await mailbox.get()))
        assert taken == list(range(3000))
        assert missed > 0
        await talking.close()
        await listening.close()

    run(main())


def test_a_send_that_fails_and_takes_the_wake_up_of_a_receive(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()
        listening = router(ipc, got)
        with plain(zmq.DEALER, listening.endpoint) as client:
            for number in range(1, 21):
                await asyncio.sleep(0)  # what the last message left to look for is looked for
                client.send(b"x")
                select.select([listening._fd], [], [], 20)  # it has come, and the loop has not heard of it
                start = time.perf_counter()
                while time.perf_counter() - start < 0.003:  # ZeroMQ takes wake-ups in a send every 1 to 2 ms only
                    with pytest.raises(PeerUnreachableError):
                        listening.send(b"nobody", [b"y"])
                async with asyncio.timeout(20):
                    await got.until(lambda number=number: len(got.messages) == number)  # type: ignore[misc]
        await listening.close()

    run(main())


def test_a_send_that_takes_the_wake_up_of_a_receive(run: Run, ipc: str) -> None:
    """ZeroMQ takes the news of an arrival in any call: the descriptor falls silent before anybody has read."""

    async def main() -> None:
        got = Received()
        listening = router(ipc, got, outbox=10_000)
        with plain(zmq.DEALER, ipc) as one, plain(zmq.DEALER, ipc) as other:
            peers = [await hear(got, socket, [b"hello"]) for socket in (one, other)]
            one.send(b"news")  # while the loop is held: it has arrived, and the loop does not know
            arrived, _, _ = select.select([listening._fd], [], [], 20)
            while arrived:
                listening.send(peers[1], [b"x"])
                arrived, _, _ = select.select([listening._fd], [], [], 0)
            await got.until(lambda: got.messages[-1] == (peers[0], [b"news"]))
        await listening.close()

    run(main())


def test_a_restarted_peer_is_heard_under_a_new_incarnation_only(run: Run, ipc: str) -> None:
    async def main() -> None:
        got, quiet = Received(), Received()
        listening = router(ipc, got)
        first = dealer(ipc, quiet, b"stage-0#1")
        first.send([b"first"])
        await got.until(lambda: len(got.messages) == 1)
        same, new = dealer(ipc, quiet, b"stage-0#1"), dealer(ipc, quiet, b"stage-0#2")
        same.send([b"same"])
        new.send([b"new"])
        await got.until(lambda: len(got.messages) == 2)
        listening.send(b"stage-0#2", [b"to new"])
        await quiet.until(lambda: bool(quiet.messages))
        assert got.messages == [(b"stage-0#1", [b"first"]), (b"stage-0#2", [b"new"])]
        assert quiet.messages == [([b"to new"],)]
        for socket in (first, same, new):
            await socket.close()
        await listening.close()

    run(main())


def test_an_oversized_frame_costs_its_sender_the_connection(run: Run, ipc: str) -> None:
    async def main() -> None:
        got = Received()
        limits = Limits(max_header_bytes=10, max_body_bytes=1000, max_buffer_bytes=10)
        listening = router(ipc, got, limits=limits)
        with plain(zmq.DEALER, ipc) as rude, plain(zmq.DEALER, ipc) as polite:
            await hear(got, rude, [bytes(1000)])
            monitor = rude.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            rude.send(bytes(1001))
            await asyncio.get_running_loop().run_in_executor(None, monitor.poll, 20_000)
            assert monitor.poll(0)
            rude.disable_monitor()
            monitor.close()
            await hear(got, polite, [b"still here"])
        assert [frames for _, frames in got.messages] == [[bytes(1000)], [b"still here"]]
        await listening.close()

    run(main())


def test_a_taken_port_is_named(run: Run) -> None:
    async def main() -> None:
        got = Received()
        first = router("tcp://127.0.0.1:*", got)
        port = first.endpoint.rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is already in use") as caught:
            router(first.endpoint, got)
        assert caught.value.param == "port"
        await first.close()

    run(main())


@pytest.mark.parametrize(
    ("bind", "reason"),
    [
        ("tcp://0.0.0.0:*", "can be reached from other machines"),
        ("ipc:///nowhere/at/all", "cannot listen on ipc:///nowhere/at/all: No such file"),
        ("tcp://127.0.0.1:nope", "cannot listen on"),
    ],
)
def test_addresses_that_cannot_be_bound(run: Run, bind: str, reason: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=reason):
            router(bind, Received())

    run(main())


def test_bad_arguments(run: Run, ipc: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="outbox holds at least 1"):
            router(ipc, Received(), outbox=0)
        with pytest.raises(ConfigError, match="cannot connect to nonsense"):
            dealer("nonsense", Received())
        for identity in (b"", b"\0x", bytes(256)):
            with pytest.raises(ConfigError, match="1 to 255 bytes"):
                dealer(ipc, Received(), identity)

    run(main())


def test_one_context_made_at_first_use() -> None:
    close_context()
    assert sockets._context is None
    made = context()
    assert context() is made
    assert made.linger == 0
    close_context()
    assert made.closed
    assert context() is not made

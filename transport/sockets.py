"""ROUTER and DEALER sockets on an asyncio loop: sends never block, nothing is dropped in silence.

A socket is read by one callback on its file descriptor, registered once and removed only at close. That is why
``zmq.asyncio`` is not used: it makes a future per ``recv``, and cancelling one (any timeout does) can lose a message
that was already taken; and it is slower (``tests.bench.actors`` has the figures).

ZeroMQ's descriptor belongs to the socket's internal mailbox, not to its messages: it fires when a command arrives there
(a message, a peer gone, room in a peer's queue), and any call on the socket may take the commands and with them the
wake-up. So every wake-up reads until ZeroMQ says that there is nothing, and every send is followed by the question
whether there is something. A wake-up's first message is delivered before any question, and what it sets going runs
before the rest is looked for: questions are system calls, and an answer that somebody waits for should not wait for
them. Room for a peer that was full is also looked for on a timer.

One message that cannot be taken raises ``PeerUnreachableError`` from ``send``. One that was taken into the outbox and
then cannot be delivered goes to ``on_dead_letter``. What ZeroMQ has taken is out of our hands: it is lost if the peer
dies, as with any socket, so whoever needs to know asks for an answer. All methods must be called on the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import zmq
import zmq.backend

from actorpp.errors import ConfigError, PeerUnreachableError, TransportError
from actorpp.transport.addresses import check_bind
from actorpp.transport.curve import CurveClient, CurveServer, secure_client, secure_server
from actorpp.transport.wire import Frame, Limits

# Messages that ZeroMQ itself queues for a peer, before the outbox. Small, because it reports none of these
# when the peer goes; large enough that the outbox is used only by a peer that falls behind.
SEND_MARK = 64

# Messages that ZeroMQ takes in per peer before the loop reads them. At this mark it stops reading the connection, and
# if an ipc peer leaves just then, it drops what the kernel still holds: so more than any credit lets be under way.
RECEIVE_MARK = 1000

# Messages read in one turn of the loop: a flood on one socket must not keep timers and other sockets waiting.
READ_BATCH = 64

# Seconds between tries to send to peers that were full, as the news of room may be taken by a call for another peer.
RETRY_FULL_S = 0.01

# pyzmq's C methods and plain integers: its Python wrappers and enum flags triple what a frame costs here.
_send_frame = zmq.backend.Socket.send
_recv = zmq.backend.Socket.recv
_poll = zmq.backend.zmq_poll

_NO_WAIT = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_POLLIN = int(zmq.POLLIN)

_context: tuple[int, zmq.Context[zmq.Socket[bytes]]] | None = None
_context_lock = threading.Lock()  # engines may start in several threads at once


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's ZeroMQ context, made at first use: a context does not survive a fork."""
    global _context
    with _context_lock:
        if _context is None or _context[0] != os.getpid() or _context[1].closed:
            made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            made.linger = 0  # inherited by every socket: closing one never waits for its unsent messages
            _context = (os.getpid(), made)
        return _context[1]


def close_context() -> None:
    """Ends this process's context and its threads, if there is one. Its sockets must be closed before."""
    global _context
    if _context is not None and _context[0] == os.getpid():
        _context[1].destroy(linger=0)
    _context = None


class _Socket(ABC):
    """What Router and Dealer share: the reader, and the outboxes of messages that ZeroMQ has no room for.

    Attributes:
        closed: Whether ``close`` was called.
    """

    _routed: bool
    """Whether messages come with the routing id of their sender in front, which is never their last frame."""

    def __init__(
        self, kind: int, limits: Limits, outbox: int, on_error: Callable[[BaseException], None] | None
    ) -> None:
        if outbox < 1:
            raise ConfigError(f"an outbox holds at least 1 message, got {outbox}")
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._on_error = on_error or self._report
        self._outbox_capacity = outbox
        self._outboxes: dict[bytes, deque[Sequence[Frame]]] = {}
        self._look_again: asyncio.Handle | None = None
        self._retry_full: asyncio.TimerHandle | None = None
        self._drained: asyncio.Event = asyncio.Event()
        self._last: zmq.Frame  # of the message that is being delivered
        self._after_close: Callable[[], object] = lambda: None
        self._socket: zmq.Socket[bytes] = context().socket(kind)
        self._incoming = [(self._socket, _POLLIN)]
        self._socket.linger = 0
        self._socket.set(zmq.SNDHWM, SEND_MARK)
        self._socket.set(zmq.RCVHWM, RECEIVE_MARK)
        self._socket.set(zmq.MAXMSGSIZE, limits.max_frame_bytes)

    def _open(self) -> None:
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._on_wake_up)
        self._look_soon()  # an edge may have gone by before the reader was there

    @property
    def backlog(self) -> int:
        """Messages waiting in the outboxes of all peers."""
        return sum(map(len, self._outboxes.values()))

    async def close(self, flush_s: float = 0.0) -> None:
        """Closes the socket; what is left in the outboxes becomes dead letters.

        Args:
            flush_s: Seconds to wait for slow peers to take what is in the outboxes; ZeroMQ then delivers in the
                background for as long again, if the process lives on.
        """
        if self.closed:
            return
        if flush_s > 0 and self._outboxes:
            self._drained.clear()
            with contextlib.suppress(TimeoutError):  # the rest becomes dead letters below
                await asyncio.wait_for(self._drained.wait(), flush_s)
            if self.closed:
                return
        self.closed = True
        self._loop.remove_reader(self._fd)
        for handle in (self._look_again, self._retry_full):
            if handle is not None:
                handle.cancel()
        self._socket.close(linger=int(flush_s * 1000))
        self._after_close()
        for peer in list(self._outboxes):
            self._drop(peer, "the socket was closed")

    def _send(self, peer: bytes, message: Sequence[Frame]) -> None:
        if self.closed:
            raise PeerUnreachableError("the socket is closed")
        waiting = self._outboxes.get(peer)
        if waiting is None:
            try:
                sent = self._try_send(message)
            except TransportError:
                self._look_soon()  # it may have taken a wake-up all the same
                raise
            if not sent:
                self._outboxes[peer] = deque([message])
                self._look_soon()  # which goes on looking for room
            elif self._look_again is None and self._readable():
                self._look_soon()
        elif len(waiting) < self._outbox_capacity:
            waiting.append(message)
        else:
            raise PeerUnreachableError(f"{self._name(peer)} does not read: {len(waiting)} messages wait in its outbox")

    def _try_send(self, message: Sequence[Frame]) -> bool:
        """Hands a message to ZeroMQ; False if it has no room now."""
        socket = self._socket
        *head, last = message
        try:
            for frame in head:
                _send_frame(socket, frame, _SEND_MORE)
            _send_frame(socket, last, _NO_WAIT)
        except zmq.Again:  # only at the first frame: ZeroMQ has room for all of a message or for none of it
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                raise PeerUnreachableError("no such peer is connected") from None
            raise TransportError(f"send failed: {error}") from error
        return True

    def _readable(self) -> bool:
        """Whether there is a message. If not, all commands are taken, and only a new one, which wakes, brings one."""
        return bool(_poll(self._incoming, 0))  # the option EVENTS says the same, through a Python enum

    def _look_soon(self) -> None:
        if self._look_again is None:
            self._look_again = self._loop.call_soon(self._look)

    def _on_wake_up(self) -> None:
        """Takes one message at once, and leaves the rest, with all questions to ZeroMQ, until it has been acted on."""
        self._take()
        if not self.closed:  # by a callback
            self._look_soon()

    def _take(self) -> bool:
        """Receives and delivers one message; False if there is none."""
        socket = self._socket
        try:
            # A Frame costs a microsecond more than bytes, but knows if another follows. After a routing id one does.
            message = [_recv(socket, _NO_WAIT)] if self._routed else []
            while True:
                frame = _recv(socket, _NO_WAIT, False)
                message.append(frame.bytes)
                if not frame.more:
                    break
        except zmq.Again:  # nothing but commands, or taken back by ZeroMQ, as when its peer has gone
            return False
        except zmq.ZMQError as error:
            self._on_error(TransportError(f"receive failed: {error}"))
            return False
        self._last = frame
        try:
            self._deliver(message)
        except Exception as error:  # a fault of the receiver must not end the reader, nor go unseen
            self._on_error(error)
        del self._last  # it holds the message's bytes twice, and the next one may be long in coming
        return True

    def _look(self) -> None:
        """Reads a batch, then flushes the outboxes. Comes back while there is more to read, or more room may come."""
        self._look_again = None
        if self._retry_full is not None:
            self._retry_full.cancel()
            self._retry_full = None
        for _ in range(READ_BATCH):
            if self.closed:  # by a callback
                return
            if not (self._readable() and self._take()):
                break
        else:
            self._look_soon()
        if self.closed or not self._outboxes:
            return
        moved = [self._flush(peer) for peer in list(self._outboxes)]
        if any(moved) or self._readable():
            self._look_soon()
        elif self._outboxes:
            self._retry_full = self._loop.call_later(RETRY_FULL_S, self._look)

    def _flush(self, peer: bytes) -> bool:
        """Sends from one outbox while there is room; whether any was found. A peer that has gone loses its outbox."""
        waiting = self._outboxes[peer]
        before = len(waiting)
        try:
            while waiting and self._try_send(waiting[0]):
                waiting.popleft()
        except TransportError as error:
            self._drop(peer, error.message)
            return True
        if not waiting:
            del self._outboxes[peer]
            if not self._outboxes:
                self._drained.set()
        return len(waiting) < before

    def _drop(self, peer: bytes, reason: str) -> None:
        for message in self._outboxes.pop(peer):
            try:
                self._dead_letter(peer, message, reason)
            except Exception as error:  # the other letters still have to be reported
                self._on_error(error)
        if not self._outboxes:
            self._drained.set()

    def _report(self, error: BaseException) -> None:
        message = f"{type(self).__name__}: a message was not handled"
        self._loop.call_exception_handler({"message": message, "exception": error})

    @abstractmethod
    def _name(self, peer: bytes) -> str: ...

    @abstractmethod
    def _deliver(self, message: list[bytes]) -> None: ...

    @abstractmethod
    def _dead_letter(self, peer: bytes, message: Sequence[Frame], reason: str) -> None: ...


class Router(_Socket):
    """A listening socket that talks to many peers, each under its routing id.

    Args:
        bind: ``tcp://127.0.0.1:*`` (``*``: any free port), ``tcp://host:port`` or ``ipc:///path``; an ipc path belongs
            in a directory that only this user can enter, see ``process.run_dir``.
        on_message: Called with routing id and frames of each message. A plain function, so that reading never waits.
        on_dead_letter: Called with routing id, frames and reason for a message that was taken and not delivered.
        on_error: Called with what a callback raised; by default it goes to the loop's exception handler.
        outbox: Messages kept per peer beyond what ZeroMQ holds.
        limits: Larger frames are refused by dropping the connection they come from.
        curve: Encrypt, and let only peers connect whose public keys are allowed.
        allow_remote: Let addresses other than loopback be bound without ``curve``.

    Raises:
        ConfigError: If the address is taken, malformed, or open to other machines without ``curve`` or
            ``allow_remote``.
    """

    _routed = True

    def __init__(
        self,
        bind: str,
        on_message: Callable[[bytes, list[bytes]], None],
        on_dead_letter: Callable[[bytes, Sequence[Frame], str], None],
        *,
        on_error: Callable[[BaseException], None] | None = None,
        outbox: int = 256,
        limits: Limits | None = None,
        curve: CurveServer | None = None,
        allow_remote: bool = False,
    ) -> None:
        check_bind(bind, allow_remote or curve is not None)
        super().__init__(zmq.ROUTER, limits or Limits(), outbox, on_error)
        self._on_message = on_message
        self._on_dead_letter = on_dead_letter
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        if "[" in bind:
            self._socket.set(zmq.IPV6, 1)
        if curve is not None:
            self._after_close = secure_server(self._socket, curve)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._after_close()
            if error.errno == errno.EADDRINUSE:
                host, _, port = bind.partition("://")[2].rpartition(":")
                raise ConfigError(f"port {port} on {host} is already in use", param="port") from None
            raise ConfigError(f"cannot listen on {bind}: {error.strerror}") from None
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._open()

    def send(self, routing_id: bytes, frames: Sequence[Frame]) -> None:
        """Sends frames to a peer, or puts them into its outbox; never blocks.

        Raises:
            PeerUnreachableError: If no such peer is connected, its outbox is full, or this socket is closed.
        """
        self._send(routing_id, [routing_id, *frames])

    def sender_type(self) -> str:
        """Socket type (``REQ``, ``DEALER``…) of who sent the message that ``on_message`` is being called with."""
        return str(self._last.get("Socket-Type"))

    def _name(self, peer: bytes) -> str:
        return f"peer {peer!r}"

    def _deliver(self, message: list[bytes]) -> None:
        self._on_message(message.pop(0), message)

    def _dead_letter(self, peer: bytes, message: Sequence[Frame], reason: str) -> None:
        self._on_dead_letter(peer, message[1:], reason)


class Dealer(_Socket):
    """A connecting socket with one peer. Messages sent before the peer is there wait, in order, for it.

    Args:
        connect: Endpoint of a Router.
        identity: The routing id under which the Router knows this socket, 1 to 255 bytes. A Router hears an id only
            on the first connection that claims it, so a restarted process must use a new one (``stage-0#2``).
        on_message: Called with the frames of each message. A plain function, so that reading never waits.
        on_dead_letter: Called with frames and reason for a message that was taken and not delivered.
        on_error: Called with what a callback raised; by default it goes to the loop's exception handler.
        outbox: Messages kept beyond what ZeroMQ holds.
        limits: Larger frames are refused by dropping the connection they come from.
        curve: The keys to show a Router that has CURVE.
    """

    _routed = False

    def __init__(
        self,
        connect: str,
        identity: bytes,
        on_message: Callable[[list[bytes]], None],
        on_dead_letter: Callable[[Sequence[Frame], str], None],
        *,
        on_error: Callable[[BaseException], None] | None = None,
        outbox: int = 256,
        limits: Limits | None = None,
        curve: CurveClient | None = None,
    ) -> None:
        if not 1 <= len(identity) <= 255 or identity[0] == 0:
            raise ConfigError(f"a routing id has 1 to 255 bytes and begins with none of value 0, got {identity!r}")
        super().__init__(zmq.DEALER, limits or Limits(), outbox, on_error)
        self._on_message = on_message
        self._on_dead_letter = on_dead_letter
        self._peer = connect.encode()
        self._socket.set(zmq.ROUTING_ID, identity)
        if "[" in connect:
            self._socket.set(zmq.IPV6, 1)
        if curve is not None:
            secure_client(self._socket, curve)
        try:
            self._socket.connect(connect)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigError(f"cannot connect to {connect}: {error.strerror}") from None
        self._open()

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends frames to the peer, or puts them into the outbox; never blocks.

        Raises:
            PeerUnreachableError: If the outbox is full or this socket is closed.
        """
        self._send(self._peer, frames)

    def _name(self, peer: bytes) -> str:
        return peer.decode()

    def _deliver(self, message: list[bytes]) -> None:
        self._on_message(message)

    def _dead_letter(self, peer: bytes, message: Sequence[Frame], reason: str) -> None:
        self._on_dead_letter(message, reason)

"""Stage processes on this host: start them, watch them, end them; and the private directory for their sockets.

A process is started fresh, never forked from a running interpreter, in a process group of its own, so that the
terminal's Ctrl-C reaches the driver alone. It inherits the read end of a pipe whose write end only the driver holds:
when the driver dies, whatever the way, the kernel closes that end and the child leaves. What a child runs is the
caller's business: this module knows no command line. Linux only.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from actorpp.errors import ConfigError

LIVENESS_FD = "ACTORPP_LIVENESS_FD"
"""Environment variable with the number of the descriptor that a child gives to ``leave_with_parent``."""

MAX_LINE = 8192
"""Characters of one line of a child's output; longer lines are handed over in pieces."""

_READ_SIZE = 65536
_STDERR = 2


class ChildProcess:
    """A running child of this process. Made on a running event loop, which notices its end.

    Args:
        argv: Program and arguments, for instance ``[sys.executable, "-m", "actorpp.cli", "stage", …]``.
        env: Variables added to this process's own environment.
        on_line: Called with each line the child writes to stdout or stderr, line end taken off. Without it both go to
            this process's stderr: stdout may be carrying a result.
        on_error: Called with what ``on_line`` raised; by default it goes to the loop's exception handler.

    Raises:
        ConfigError: If the program cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._on_line = on_line
        self._on_error = on_error or self._report
        self._partial = ""
        child_end, self._liveness = os.pipe()  # both closed on exec, but for the end passed on
        output: int | None = None
        stdout = _STDERR
        if on_line is not None:
            output, stdout = os.pipe()
        process = None
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {}), LIVENESS_FD: str(child_end)},
                pass_fds=(child_end,),
                process_group=0,
            )
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            if process is not None:  # it runs, but no descriptor is left to watch it by
                process.kill()
                process.wait()
            os.close(self._liveness)
            if output is not None:
                os.close(output)
            raise ConfigError(f"cannot start {argv[0]}: {error.strerror}") from None
        finally:
            os.close(child_end)
            if output is not None:
                os.close(stdout)
        self._process = process
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._output = output
        if output is not None:
            os.set_blocking(output, False)
            self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            self._loop.add_reader(output, self._on_output)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal's number if one ended it, or None while it runs."""
        return self._exit.result() if self._exit.done() else None

    @property
    def ended(self) -> bool:
        """Whether it has ended, asked of the kernel: true also before the loop has heard of it."""
        if self._exit.done():
            return True
        poller = select.poll()  # select() refuses descriptors from 1024 on
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    async def wait(self) -> int:
        """Waits for the end and returns the exit code. Cancelling a wait leaves the child and other waits alone."""
        return await asyncio.shield(self._exit)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to this child only, not to a later process that got its pid; nothing if it has ended."""
        if not self._exit.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Asks the child to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the child at once (SIGKILL), a stopped one too."""
        self.send_signal(signal.SIGKILL)

    async def stop(self, grace_s: float = 2.0) -> int:
        """Terminates the child, and kills it if it is still there after ``grace_s`` seconds. Returns its exit code."""
        self.terminate()
        return await self.stop_within(grace_s)

    async def stop_within(self, grace_s: float) -> int:
        """Waits for a child that was told to end by other means, and kills it after ``grace_s`` seconds, or if this
        is cancelled. Returns its exit code.
        """
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            return await self.wait()
        except asyncio.CancelledError:
            self.kill()
            raise

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()  # has ended: returns at once, and leaves no zombie
        os.close(self._liveness)
        if self._output is not None:  # what a grandchild may write later does not count
            self._on_output()
            self._close_output()
        self._exit.set_result(code)

    def _on_output(self) -> None:
        """Reads one piece, so that a child that floods its output cannot hold the loop; the pipe bounds the rest."""
        if self._output is None:
            return
        try:
            data = os.read(self._output, _READ_SIZE)
        except BlockingIOError:
            return
        *lines, self._partial = (self._partial + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._emit(line)
        while len(self._partial) > MAX_LINE:
            self._emit(self._partial[:MAX_LINE])
            self._partial = self._partial[MAX_LINE:]
        if not data:
            self._close_output()

    def _close_output(self) -> None:
        if self._output is not None:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = None
            if self._partial:
                self._emit(self._partial)
                self._partial = ""

    def _emit(self, line: str) -> None:
        if self._on_line is None:
            return
        for start in range(0, max(1, len(line)), MAX_LINE):
            try:
                self._on_line(line[start : start + MAX_LINE].rstrip("\r"))
            except Exception as error:  # a fault of the reader of lines must not stop the pipe from being emptied
                self._on_error(error)

    def _report(self, error: BaseException) -> None:
        message = f"a line of process {self.pid} was not handled"
        self._loop.call_exception_handler({"message": message, "exception": error})


# --- the child's side ---------------------------------------------------------------------------------------------

_F_SETSIG = 10  # from <fcntl.h> of Linux; Python's fcntl module does not name it


def leave_with_parent(fd: int | None = None, exit_code: int = 1) -> None:
    """Makes this process end when its driver does, and leaves SIGINT to the driver. Call it first in a child.

    Two watchers look at the pipe. The kernel itself sends SIGKILL at end of file, which works even while the main
    thread sits in C code and holds the interpreter's lock; where it cannot be asked to (some sandboxes), a thread
    reads the pipe and leaves with ``exit_code``, as soon as it gets that lock. PR_SET_PDEATHSIG would be the usual
    way, but it fires when the *thread* that started the child ends, so a driver whose loop runs in a thread of its own
    would lose its children with it.

    Args:
        fd: The inherited read end; by default the one that ``ChildProcess`` names in the environment.

    Raises:
        ConfigError: If there is no such descriptor: this process was not started by ``ChildProcess``.
    """
    if fd is None:
        try:
            fd = int(os.environ[LIVENESS_FD])
        except (KeyError, ValueError):
            raise ConfigError(f"{LIVENESS_FD} names no descriptor: this command is started by the driver") from None
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise ConfigError(f"descriptor {fd} is no pipe")
    except OSError:
        raise ConfigError(f"descriptor {fd} is not open") from None
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_at_eof, args=(fd, exit_code), name="actorpp-liveness", daemon=True).start()
    with contextlib.suppress(OSError):
        kill_at_eof(fd)


def kill_at_eof(fd: int) -> None:
    """Has the kernel send SIGKILL to this process when the last writer of the pipe is gone.

    Raises:
        OSError: Where the system has no such signal.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _leave_at_eof(fd: int, exit_code: int) -> None:
    while os.read(fd, 1):
        pass
    os._exit(exit_code)


# --- the run directory --------------------------------------------------------------------------------------------

_PREFIX = "actorpp-"
_LONGEST_BASE = 60  # characters; a path of an ipc socket has at most 107


@contextlib.contextmanager
def run_dir(base: Path | None = None) -> Iterator[Path]:
    """A new directory that only this user can enter, for ipc sockets and file stores; removed at the end.

    The process holds a lock on it. Directories of drivers that died without removing theirs are recognised by being
    unlocked, and removed first; a pid would prove nothing, as pids return and differ between containers.

    Args:
        base: Where to make it; by default the system's folder for temporary files, or ``/tmp`` if that one's path is
            too long for sockets.
    """
    if base is None:
        base = Path(tempfile.gettempdir())
        if len(str(base)) > _LONGEST_BASE:
            base = Path("/tmp")
    remove_stale_run_dirs(base)
    lock = None
    while lock is None:  # another driver may take a directory for a stale one before it is locked
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        with contextlib.suppress(FileNotFoundError):
            lock = _lock(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_stale_run_dirs(base: Path) -> list[Path]:
    """Removes run directories of this user in ``base`` that no living process holds, and returns them."""
    removed = []
    for path in base.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # taken away by another driver meanwhile
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = _lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
                removed.append(path)
    return removed


def _lock(path: Path) -> int | None:
    """A descriptor that holds the directory's lock, or None if another process holds it or has removed the directory.

    Raises:
        FileNotFoundError: If the directory is gone.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    os.close(fd)
    return None

"""The run directory: private, short, and cleaned of what dead drivers left; children of a driver with many files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from actorpp.errors import ConfigError
from actorpp.transport.process import LIVENESS_FD, ChildProcess, leave_with_parent, remove_stale_run_dirs, run_dir

DIES = """
import os, pathlib, sys
from actorpp.transport.process import run_dir
held = run_dir(pathlib.Path(sys.argv[1]))
held.__enter__()
os._exit(0)
"""


def test_private_and_gone_afterwards(tmp_path: Path) -> None:
    with run_dir(tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_gone_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_dir(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_short_enough_for_sockets_even_if_tmpdir_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with run_dir() as path:
        assert len(str(path / "stage-999#999")) < zmq.IPC_PATH_MAX_LEN


def test_only_what_nobody_holds_is_stale(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=True, env=environment())
    (left,) = tmp_path.iterdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "actorpp-file").touch()
    (tmp_path / "actorpp-link").symlink_to(tmp_path / "other")
    with run_dir(tmp_path) as first:
        assert not left.exists()
        with run_dir(tmp_path) as second:
            assert remove_stale_run_dirs(tmp_path) == []
            assert first.exists()
            assert second.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actorpp-file", "actorpp-link", "other"]


def test_a_childs_end_is_seen_beyond_a_thousand_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    pidfd_open = os.pidfd_open

    def high(pid: int) -> int:
        low = pidfd_open(pid)
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1100)
        finally:
            os.close(low)

    async def main() -> None:
        child = ChildProcess(["sleep", "60"])
        assert not child.ended
        child.kill()
        await child.wait()
        assert child.ended

    monkeypatch.setattr(os, "pidfd_open", high)
    try:
        asyncio.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_that_cannot_be_watched_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def none_left(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        with pytest.raises(ConfigError, match="cannot start sleep: Too many open files"):
            ChildProcess(["sleep", "60"])

    monkeypatch.setattr(os, "pidfd_open", none_left)
    asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize("value", [None, "x", "9999"])
def test_a_stage_command_started_by_hand_is_refused(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(LIVENESS_FD, raising=False)
    else:
        monkeypatch.setenv(LIVENESS_FD, value)
    with pytest.raises(ConfigError):
        leave_with_parent()


def test_a_descriptor_that_is_no_pipe_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(ConfigError, match="is no pipe"):
        leave_with_parent(file.fileno())


def environment() -> dict[str, str]:
    root = Path(__file__).parents[3]
    return {**os.environ, "PYTHONPATH": str(root)}

"""Nothing is left behind: Ctrl-C in every phase, a driver that is killed, a stage that is killed."""

from __future__ import annotations

import platform
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.cli import Command, gone, running

pytestmark = pytest.mark.slow

END_S = 5.0


def left_in(environment: dict[str, str]) -> list[str]:
    return [path.name for path in Path(environment["TMPDIR"]).iterdir() if path.name.startswith("actorpp")]


def interrupt_and_check(command: Command, environment: dict[str, str], code: int = 130) -> None:
    family = command.family()
    command.interrupt()
    assert command.finish(END_S) == code, command.stderr
    assert gone(family, END_S) == []
    assert left_in(environment) == []
    assert "Traceback" not in command.stderr


def dummy(model: Path, tokens: Path, *more: str) -> list[str]:
    flags = ["--model", str(model), "--load-format", "dummy", "--stages", "2", "--prompt-tokens-file", str(tokens)]
    return [*flags, *more]


def offers_huge_pages() -> bool:
    """Whether the kernel has huge pages for who asks, and the C library asks when told to."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    name, version = platform.libc_ver()
    asks = name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return asks and enabled.exists() and "[never]" not in enabled.read_text()


def huge_pages_kb(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("AnonHugePages:")).split()[1])


@pytest.mark.parametrize("phase", ["downloading", "converting"])
def test_ctrl_c_while_the_default_model_is_made(phase: str, tmp_path: Path, environment: dict[str, str]) -> None:
    cache = tmp_path / "cache"
    environment |= {"ACTORPP_CACHE": str(cache)}
    with running("run", "--prompt", "x", environment=environment) as command:
        command.wait_for(phase)
        interrupt_and_check(command, environment)
    left = [path.name for path in cache.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert left == []


def test_ctrl_c_while_loading(environment: dict[str, str], default_model: Path) -> None:
    with running("run", "--stages", "2", "--prompt", "x", environment=environment) as command:
        command.wait_for("loading")
        interrupt_and_check(command, environment)


def test_ctrl_c_in_prefill(environment: dict[str, str], small_model: Path, long_tokens: Path) -> None:
    flags = dummy(small_model, long_tokens, "--chunked-prefill-size", "16")
    with running("run", *flags, environment=environment) as command:
        command.wait_for("prefill")
        interrupt_and_check(command, environment)


def test_ctrl_c_in_decode(environment: dict[str, str], default_model: Path) -> None:
    flags = ["--stages", "2", "--prompt", "One, two, three,", "--max-tokens", "4000", "--ignore-eos"]
    with running("run", *flags, environment=environment) as command:
        command.wait_for("four")
        interrupt_and_check(command, environment)


def test_ctrl_c_when_idle(environment: dict[str, str], small_model: Path) -> None:
    flags = ["--model", str(small_model), "--load-format", "dummy", "--stages", "2"]
    with running("run", *flags, environment=environment) as command:
        command.wait_for("serving")
        libraries = Path(f"/proc/{command.process.pid}/maps").read_text()
        assert "libzmq" in libraries
        assert "libtorch" not in libraries  # the driver starts and ends without it
        if offers_huge_pages():
            stages = command.family()[1:]
            assert [huge_pages_kb(stage.pid) > 16 << 10 for stage in stages] == [True, True]
        interrupt_and_check(command, environment)


def test_stages_leave_when_the_driver_is_killed(environment: dict[str, str], small_model: Path) -> None:
    flags = ["--model", str(small_model), "--load-format", "dummy", "--stages", "3"]
    with running("run", *flags, environment=environment) as command:
        command.wait_for("serving")
        _, *stages = command.family()
        assert len(stages) == 3
        command.process.kill()
        assert command.finish(END_S) == -signal.SIGKILL
        assert gone(stages, END_S) == []


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_stage_ends_an_engine_without_restarts_with_a_typed_error(
    victim: int, environment: dict[str, str], small_model: Path, long_tokens: Path
) -> None:
    flags = dummy(small_model, long_tokens, "--stages", "3", "--chunked-prefill-size", "16", "--max-restarts", "0")
    with running("run", *flags, environment=environment) as command:
        command.wait_for("prefill")
        family = command.family()
        family[1 + victim].kill()
        assert command.finish(END_S) == 1
        assert gone(family, END_S) == []
    assert f"stage {victim}: its process {family[1 + victim].pid} was ended by signal 9" in command.stderr
    assert left_in(environment) == []


def test_a_stopped_stage_is_noticed_within_the_watchdogs_time(
    environment: dict[str, str], small_model: Path, long_tokens: Path
) -> None:
    flags = dummy(small_model, long_tokens, "--chunked-prefill-size", "16", "--max-restarts", "0")
    with running("run", *flags, "--watchdog-timeout", "2", environment=environment) as command:
        command.wait_for("prefill")
        family = command.family()
        family[2].suspend()
        assert command.finish(2 + 2 * END_S) == 1
        assert gone(family, END_S) == []
    assert "its loop gave no sign of life" in command.stderr
    assert left_in(environment) == []


def test_two_engines_at_once_listen_on_loopback_only(environment: dict[str, str], small_model: Path) -> None:
    flags = ["--model", str(small_model), "--load-format", "dummy", "--stages", "2"]
    with (
        running("run", *flags, environment=environment) as one,
        running("run", *flags, environment=environment) as other,
    ):
        for command in (one, other):
            command.wait_for("serving")
        endpoints = {command.stdout.split("tcp://")[1].split()[0] for command in (one, other)}
        assert len(endpoints) == 2
        connections = [c for command in (one, other) for p in command.family() for c in p.net_connections("inet")]
        listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
        assert len(listening) >= 2
        remote = [c.raddr.ip for c in connections if c.raddr]
        assert {ip for ip in (*listening, *remote) if not ip.startswith("127.") and ip != "::1"} == set()
        one.interrupt()
        assert one.finish(END_S) == 130
        assert len(left_in(environment)) == 1  # the other one's
        interrupt_and_check(other, environment)

"""``actorpp`` as a process over the fake engine: what is on which stream, exit codes, signals."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq

from actorpp.cli.loop import SHOW_CURSOR
from tests.unit.serving.fakes import ANSWER, make_tokenizer

ROOT = Path(__file__).parents[3]
MAIN = Path(__file__).with_name("fake_main.py")
CEILING_S = 30.0
HIDE_CURSOR = "\x1b[?25l"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACTORPP_", "FAKE_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"FAKE_TOKENIZER": str(tokenizer), "PYTHONPATH": path}


def run(environment: dict[str, str], *flags: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAIN), "run", *flags],
        env=environment | more,
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@contextmanager
def running(
    environment: dict[str, str], *flags: str, command: str = "run", **more: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(MAIN), command, *flags],
        env=environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stderr is not None
    for text in process.stderr:
        if text.strip() == line:
            return
    pytest.fail(f"the process ended without {line!r}")


def test_text_streams_to_stdout_and_figures_to_stderr(environment: dict[str, str]) -> None:
    done = run(environment, "--prompt", "the cat", "--max-tokens", "100")
    assert done.returncode == 0
    assert done.stdout == ANSWER + "\n"
    *progress, figures, end = done.stderr.splitlines()
    assert end == "engine ended"
    assert figures == "TTFT 500.0 ms | prefill 6 tokens/s | TPOT 10.0 ms | busy per stage 90%, 80%"
    assert progress[0] == "loading: 0 of 2 stages"
    assert progress[-1].startswith("prefill: 3 of 3 tokens")


def test_json_is_one_object_and_nothing_else_is_on_stdout(environment: dict[str, str]) -> None:
    done = run(environment, "--prompt", "the cat", "--max-tokens", "100", "--json", FAKE_NOISE="1")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert set(result) == {"text", "token_ids", "prompt_tokens", "finish_reason", "stop_reason", "metrics"}
    assert set(result["metrics"]) == {
        "ttft_s",
        "e2e_s",
        "prefill_tok_s",
        "tpot_s",
        "chunks",
        "chunk_times",
        "stage_busy",
    }
    assert result["text"] == ANSWER
    assert result["metrics"]["chunks"] == [1, 1, 1]
    assert "noise from a child" in done.stderr
    assert "noise from ourselves" in done.stderr


def test_one_token_has_no_tpot(environment: dict[str, str]) -> None:
    done = run(environment, "--prompt", "x", "--max-tokens", "1", "--json")
    assert json.loads(done.stdout)["metrics"]["tpot_s"] is None


def test_an_error_with_json_leaves_stdout_empty(environment: dict[str, str]) -> None:
    done = run(environment, "--prompt", "x", "--max-tokens", "5000", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "maximum context length is 512 tokens" in done.stderr.splitlines()[-1]


def test_a_reader_that_goes_away_is_one_line(environment: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, str(MAIN), "run", "--prompt", "x"],
            env=environment, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=CEILING_S, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "actorpp: cannot write to stdout: Broken pipe"


def test_serving_prints_its_address_and_answers_a_dozen_line_client(environment: dict[str, str]) -> None:
    with running(environment, "--json") as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        assert about["model"] == "SmolLM2-135M-Instruct"
        client = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "04_zmq_client.py"), about["endpoint"], "the cat"],
            capture_output=True, text=True, timeout=CEILING_S, check=True,
        )  # fmt: skip
        assert client.stdout == "the cat" + ANSWER + "\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(CEILING_S) == 130
        assert process.stdout.read() == ""


def test_serving_for_people_and_the_trace_when_it_is_stopped(environment: dict[str, str], tmp_path: Path) -> None:
    with running(environment, "--trace", str(tmp_path / "t.json")) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving SmolLM2-135M-Instruct at http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(CEILING_S) == 143
    assert (tmp_path / "t.json").read_text() == "[]"


def test_a_taken_port_is_one_line_before_anything_is_loaded(environment: dict[str, str]) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        for flag in ("--port", "--zmq-port"):
            done = run(environment, flag, str(port))
            assert done.returncode == 2
            assert done.stderr == f"actorpp: port {port} on 127.0.0.1 is already in use\n"


@pytest.mark.parametrize("flags", [["--prompt", "x", "--json"], []], ids=["prompt", "serve"])
def test_ctrl_c_while_starting(environment: dict[str, str], flags: list[str]) -> None:
    with running(environment, *flags, FAKE_HOLD="startup") as process:
        wait_for(process, "reached startup")
        check_interrupt(process)


@pytest.mark.parametrize("point", ["prefill", "decode"])
def test_ctrl_c_in_the_middle_of_a_request(environment: dict[str, str], point: str) -> None:
    with running(environment, "--prompt", "the cat", FAKE_HOLD=point) as process:
        wait_for(process, f"reached {point}")
        check_interrupt(process, ended=True)


def test_ctrl_c_while_a_client_waits_answers_it(environment: dict[str, str]) -> None:
    with running(environment, "--json", FAKE_HOLD="decode") as process, zmq.Context() as context:
        assert process.stdout is not None
        endpoint = json.loads(process.stdout.readline())["endpoint"]
        with context.socket(zmq.REQ) as client:
            client.linger = 0
            client.rcvtimeo = int(CEILING_S * 1000)
            client.connect(endpoint)
            header = msgpack.packb({"id": "a", "op": "generate"})
            client.send_multipart([b"ACTORPP1", header, msgpack.packb({"prompt": "x"})])
            wait_for(process, "reached decode")
            process.send_signal(signal.SIGINT)
            _, reply, error = client.recv_multipart()
            assert msgpack.unpackb(reply)["status"] == "error"
            assert msgpack.unpackb(error)["code"] == "aborted"
        assert process.wait(CEILING_S) == 130


def test_flags_of_the_http_door(environment: dict[str, str]) -> None:
    flags = ["--served-model-name", "mine", "--api-key", "k", "--sse-keep-alive", "0.02", "--client-timeout", "0.5"]
    with running(environment, "--json", *flags, FAKE_HOLD="decode") as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        assert about["model"] == "mine"
        with httpx.Client(base_url=about["http"], timeout=CEILING_S) as client:
            assert client.get("/v1/models").status_code == 401
            client.headers["Authorization"] = "Bearer k"
            assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
            with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
                assert ": keep-alive" in response.iter_lines()
            with socket.create_connection((client.base_url.host, client.base_url.port)) as idle:
                idle.settimeout(CEILING_S)
                assert idle.recv(1) == b""  # it was ended
        process.send_signal(signal.SIGTERM)
        assert process.wait(CEILING_S) == 143


def test_sigterm_takes_no_new_request_and_ends_what_takes_too_long(environment: dict[str, str]) -> None:
    with running(environment, "--json", "--drain-timeout", "0.5", FAKE_HOLD="decode") as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["http"]
        with httpx.Client(base_url=url, timeout=CEILING_S) as client:
            fields = {"prompt": "x", "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=fields) as response:
                wait_for(process, "reached decode")
                process.send_signal(signal.SIGTERM)
                lines = list(response.iter_lines())  # until the drain's time is over
        assert json.loads(lines[-4].removeprefix("data: "))["error"]["code"] == "aborted"
        assert process.wait(CEILING_S) == 143


def test_serve_is_run_with_the_model_first(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(MAIN), "serve", "org/name", "--model", "other"],
        env=environment, capture_output=True, text=True, timeout=CEILING_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--model says again" in done.stderr
    with running(environment, "org/name", "--json", command="serve") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["model"] == "org/name"


def check_interrupt(process: subprocess.Popen[str], *, ended: bool = False) -> None:
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=CEILING_S)
    assert time.monotonic() - start < 5
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not ended or err.splitlines()[-1] == "engine ended"


def test_a_second_ctrl_c_ends_what_does_not_end(environment: dict[str, str]) -> None:
    flags = ["--prompt", "x", "--shutdown-timeout", "1000"]
    with running(environment, *flags, FAKE_HOLD="decode", FAKE_STUBBORN="1") as process:
        wait_for(process, "reached decode")
        process.send_signal(signal.SIGINT)
        wait_for(process, "reached end")
        process.send_signal(signal.SIGINT)
        assert process.wait(CEILING_S) == 130


def test_what_does_not_end_is_ended_after_the_grace(environment: dict[str, str]) -> None:
    flags = ["--prompt", "x", "--shutdown-timeout", "0.01"]
    with running(environment, *flags, FAKE_HOLD="decode", FAKE_STUBBORN="1") as process:
        wait_for(process, "reached decode")
        process.send_signal(signal.SIGINT)
        assert process.wait(CEILING_S) == 130


def on_terminal(environment: dict[str, str], *flags: str, interrupt_at: bytes = b"", **more: str) -> tuple[int, str]:
    """Run with a terminal for its streams; SIGINT comes when ``interrupt_at`` shows there. Returns code and output."""
    terminal, theirs = pty.openpty()
    seen = b""
    with os.fdopen(terminal, "rb", buffering=0) as stream:
        with os.fdopen(theirs) as end:
            process = subprocess.Popen(
                [sys.executable, str(MAIN), "run", *flags],
                env=environment | {"TERM": "xterm", "COLUMNS": "100"} | more,
                stdin=end, stdout=end, stderr=end,
            )  # fmt: skip
        with process, contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
            while data := stream.read(4096):
                seen += data
                if interrupt_at and interrupt_at in seen:
                    process.send_signal(signal.SIGINT)
                    interrupt_at = b""
    return process.returncode, seen.decode()


def test_a_terminal_shows_bars_and_then_the_answer(environment: dict[str, str]) -> None:
    code, seen = on_terminal(environment, "--prompt", "the cat", "--max-tokens", "100")
    assert code == 0
    assert "2 of 2 stages" in seen
    assert "3 of 3 tokens" in seen
    bars, answer = seen.split(SHOW_CURSOR)
    assert HIDE_CURSOR in bars
    assert answer.startswith(ANSWER + "\r\n" + "TTFT ")


def test_a_terminal_shows_bars_and_then_the_address(environment: dict[str, str]) -> None:
    code, seen = on_terminal(environment, interrupt_at=b"ends it")
    assert code == 130
    bars, rest = seen.split(SHOW_CURSOR)
    assert "2 of 2 stages" in bars
    assert rest.startswith("serving SmolLM2-135M-Instruct at http://127.0.0.1:")


@pytest.mark.parametrize("stubborn", [{}, {"FAKE_STUBBORN": "1"}], ids=["", "stubborn"])
def test_ctrl_c_on_a_terminal_gives_the_cursor_back(environment: dict[str, str], stubborn: dict[str, str]) -> None:
    flags = ["--prompt", "the cat", "--shutdown-timeout", "0.01"]
    code, seen = on_terminal(environment, *flags, interrupt_at=b"reached prefill", FAKE_HOLD="prefill", **stubborn)
    assert code == 130
    assert seen.rfind(SHOW_CURSOR) > seen.rfind(HIDE_CURSOR)
    assert "Traceback" not in seen


def test_a_long_text_for_the_default_context(tmp_path: Path) -> None:
    script = ROOT / "examples" / "long_text.py"
    for arguments, name in (([], "LONG.txt"), (["other.txt", "1000"], "other.txt")):
        subprocess.run([sys.executable, str(script), *arguments], cwd=tmp_path, check=True, capture_output=True)
        text = (tmp_path / name).read_text()
        assert len(text) == (31_000 if not arguments else 1000)
        assert text.startswith('The "assert" statement')


def actorpp(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "actorpp.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CEILING_S, check=False, **more)


def test_python_m_version_and_bare_command() -> None:
    assert actorpp("--version").stdout.startswith("actorpp ")
    assert "run" in actorpp().stdout
    wrong = actorpp("rum")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_neither_help_nor_the_driver_imports_torch_or_transformers() -> None:
    """Nor what serves HTTP, or fits a chunk plan, where nobody asked for it."""
    heavy = ("torch", "transformers", "fastapi", "uvicorn", "scipy", "plotly")
    for script in ("main(['run', '--help'])", "import actorpp.cli.run, actorpp.serving.zmq_server"):
        code = (
            "import sys, atexit; from actorpp.cli.main import main\n"
            f"atexit.register(lambda: print('HEAVY', [m for m in {heavy} if m in sys.modules]))\n" + script
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=CEILING_S, check=True
        )
        assert done.stdout.splitlines()[-1] == "HEAVY []"

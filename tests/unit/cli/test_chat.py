"""``actorpp chat`` against a server over the fake engine."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actorpp.cli.main import main
from actorpp.config import EngineConfig
from actorpp.serving.gateway import Gateway
from actorpp.serving.tokenizer import TextCodec
from tests.unit.serving.fakes import ANSWER, FakeCheckpoint, FakeEngine, make_tokenizer
from tests.unit.serving.http.support import serving

Chat = Callable[..., int]


@contextmanager
def server(folder: Path, **options: object) -> Iterator[tuple[str, FakeEngine]]:
    """In a thread of its own, since the command line is synchronous."""
    tokenizer = make_tokenizer(folder / "model")
    ids = TextCodec(tokenizer).encode(ANSWER, add_special_tokens=False)
    engine = FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer), answer=lambda prompt: ids)
    loop, end, ready, told = asyncio.new_event_loop(), asyncio.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with engine, Gateway(engine, "tiny") as gateway, serving(gateway, **options) as url:
            told.append(url)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield told[0], engine
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Chat:
    def run(*flags: str, lines: str = "the cat\n") -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        with pytest.raises(SystemExit) as ended:
            main(["chat", *flags])
        return int(str(ended.value.code))

    return run


def test_a_conversation(chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(tmp_path, api_key="k") as (url, engine):
        flags = ["--system", "be brief", "--max-tokens", "100", "--temperature", "0.5", "--stats", "--api-key", "k"]
        assert chat(url, *flags, lines="the cat\n\nthe hat\n") == 0
        out, err = capsys.readouterr()
        assert out == f"{ANSWER}\n{ANSWER}\n"
        assert err.count("TTFT") == 2
        codec = TextCodec(tmp_path / "model" / "tokenizer.json")
        texts = [codec.decode(handle.prompt_ids) for handle in engine.submitted]
        assert texts[0] == "system\nbe brief\nuser\nthe cat\nassistant\n"
        assert texts[1] == f"system\nbe brief\nuser\nthe cat\nassistant\n{ANSWER}\nuser\nthe hat\nassistant\n"
        assert [handle.params.sampling.temperature for handle in engine.submitted] == [0.5, 0.5]
        assert engine.submitted[0].params.max_tokens == 100
        assert chat(url, "--api-key", "wrong") == 2
        assert capsys.readouterr().err == "actorpp: give the server's key: Authorization: Bearer KEY\n"


def test_no_server_is_one_line(chat: Chat, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with server(tmp_path) as (url, _):
        pass
    assert chat(url) == 1
    assert capsys.readouterr().err.startswith(f"actorpp: no answer from {url}: ")
    for nonsense in ("nonsense", "http://127.0.0.1:x", "http://127.0.0.1:80000", "http://[::1"):
        assert chat(nonsense) == 2
        assert "no address of a server" in capsys.readouterr().err


def test_an_answer_that_breaks_off_is_an_error(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    piece = b'data: {"choices": [{"delta": {"content": "so far"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer_once(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(head + b"%x\r\n%b\r\n" % (len(piece), piece))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer_once, args=(listening,), daemon=True)
        thread.start()
        assert chat(f"http://127.0.0.1:{listening.getsockname()[1]}") == 1
        thread.join()
    out, err = capsys.readouterr()
    assert out == "so far"
    assert "broke its answer off" in err


def test_ctrl_c_ends_the_answer_and_forgets_it(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(tmp_path) as (url, engine):
        written: list[str] = []

        def interrupted(text: str = "", **more: object) -> None:
            written.append(text)
            if len(written) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr("builtins.print", interrupted)
        assert chat(url, lines="the cat\nthe hat\n") == 0
        codec = TextCodec(tmp_path / "model" / "tokenizer.json")
        assert codec.decode(engine.submitted[1].prompt_ids) == "user\nthe hat\nassistant\n"

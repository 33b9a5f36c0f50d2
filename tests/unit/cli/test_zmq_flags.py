"""The flags of the ZeroMQ door, each seen from outside: a process over the fake engine, and a plain client."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import msgpack
import pytest
import zmq
import zmq.auth

from actorpp.cli.main import main
from tests.unit.cli.test_process import CEILING_S, running
from tests.unit.cli.test_process import environment as environment

MS = int(CEILING_S * 1000)


def test_curve_and_connection_file(environment: dict[str, str], tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.mkdir()
    _, server_secret = zmq.auth.create_certificates(tmp_path, "server")
    _, alice_secret = zmq.auth.create_certificates(clients, "alice")
    Path(server_secret).chmod(0o600)
    connection_file = tmp_path / "connection.json"
    flags = ["--curve-key", server_secret, "--curve-allow", str(clients), "--connection-file", str(connection_file)]
    with running(environment, *flags, "--zmq-host", "0.0.0.0") as process, zmq.Context() as context:
        assert process.stdout is not None
        process.stdout.readline()
        connection = json.loads(connection_file.read_text())
        assert connection["endpoint"].startswith("tcp://0.0.0.0:")  # CURVE lets it beyond loopback
        with context.socket(zmq.REQ) as client:
            client.linger, client.rcvtimeo = 0, MS
            client.curve_publickey, client.curve_secretkey = zmq.auth.load_certificate(alice_secret)
            client.curve_serverkey = connection["curve_server_key"].encode()
            client.connect(connection["endpoint"].replace("0.0.0.0", "127.0.0.1"))
            header = {"id": 1, "op": "stages", "token": connection["token"]}
            client.send_multipart([b"ACTORPP1", msgpack.packb(header), msgpack.packb({})])
            _, reply, body = client.recv_multipart()
            assert msgpack.unpackb(reply)["boot"] == connection["boot"]
            assert len(msgpack.unpackb(body)["stages"]) == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=CEILING_S)
    assert not connection_file.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--curve-key", "k"], ["--curve-key and --curve-allow go together"]),
        (["--curve-key", "k", "--curve-allow", "c"], ["key file k", "No such file"]),
        (["--zmq-host", "0.0.0.0"], ["0.0.0.0", "turn CURVE on"]),
        (["--host", "0.0.0.0", "--insecure-bind", "--api-key", "k"], ["--api-key guards HTTP alone", "--zmq-host"]),
        (["--connection-file", "none/c.json"], ["none/c.json", "No such file"]),
        (["--prompt", "x", "--connection-file", "c.json"], ["--connection-file", "only without a prompt"]),
    ],
)
def test_what_cannot_work_is_one_line(
    flags: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["run", *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for word in words:
        assert word in error

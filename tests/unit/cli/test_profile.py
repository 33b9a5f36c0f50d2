"""``actorpp profile``: its tables, worked out by hand."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import typer

from actorpp.cli.app import app
from actorpp.cli.main import main
from actorpp.cli.options import engine_flags
from actorpp.cli.profile import CHANGES_NOTHING, profile_text
from actorpp.coordinator.chunking.cost import StageCost
from actorpp.coordinator.chunking.fit import StageFit, StageSample
from actorpp.coordinator.chunking.profile import Profile
from tests.exactness.tiny import save_llama


def test_the_fit_and_its_residuals_are_printed() -> None:
    samples = (StageSample(0, 512, False, (0.1, 0.2)), StageSample(1024, 512, True, (0.15, 0.25)))
    fits = (
        StageFit(StageCost(c=0.002, gamma=1e-6, b=2e-4, a=3e-9, head=0.004), (0.001, -0.003), 0.998),
        StageFit(StageCost(c=0.001, gamma=0, b=3e-4, a=1e-9), (0.05, 0.0), 0.9),
    )
    lines = [line.split() for line in profile_text(samples, fits).splitlines()]
    assert ["0", "2.000", "1.0000", "200.00", "3.000", "4.000", "0.99800", "2.0%"] in lines
    assert ["1", "1.000", "0.0000", "300.00", "1.000", "0.000", "0.90000", "25.0%"] in lines
    assert ["0", "+", "512", "100.0", "(+1.0%)", "200.0", "(+25.0%)"] in lines
    assert ["1024", "+", "512", "sampled", "150.0", "(-2.0%)", "250.0", "(+0.0%)"] in lines


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in os.environ:
        if name.startswith("ACTORPP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path / "cache"))
    model = save_llama(tmp_path / "model", layers=4, max_position_embeddings=256)
    small = ["--transport", "inproc", "--stages", "2", "--threads-per-stage", "1", "--dtype", "float32"]
    return ["profile", "--model", str(model), "--kv-tokens", "1024", *small]


def test_what_was_measured_is_printed_and_kept(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACTORPP_ENABLE_DYNAMIC_CHUNKING", "1")
    monkeypatch.setattr("actorpp.engine.measure_profile", lambda *_, **__: pytest.fail("taken at the start already"))
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    (file,) = (tmp_path / "cache" / "profiles").rglob("*.json")
    assert file.name == "2-2.json"
    assert out.splitlines()[-1] == f"saved to {file}"
    kept = msgspec.json.decode(file.read_bytes(), type=Profile)
    assert len(kept.fit()) == 2
    for sample in kept.samples:
        assert f"{sample.history} + {sample.tokens}" in out
    assert "profiling: " in err


def test_a_profile_within_small_limits_is_printed_but_not_kept(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--context-length", "100"])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert "t(L, x) = " in out
    assert "saved to" not in out
    assert "the profile is not saved: it covers prompts up to 98 tokens and chunks up to 98" in err.splitlines()[-1]
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_flags_that_would_change_nothing_are_none(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = typer.main.get_command(app).commands["profile"].params  # type: ignore[attr-defined]
    assert {flag.name for flag in flags} - {"help"} == set(engine_flags()) - set(CHANGES_NOTHING)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--seed", "1"])
    assert ended.value.code == 2
    assert "No such option: --seed" in capsys.readouterr().err

"""``actorpp profile``: its tables, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from actorpp.cli.main import main
from actorpp.cli.profile import profile_text
from actorpp.coordinator.chunking.cost import StageCost
from actorpp.coordinator.chunking.fit import StageFit, StageSample
from actorpp.coordinator.chunking.profile import Profile, ProfileKey
from tests.exactness.tiny import save_llama


def test_the_fit_and_its_residuals_are_printed() -> None:
    key = ProfileKey("m", "float32", "cpu", 1, (2, 2))
    samples = (StageSample(0, 512, False, (0.1, 0.2)), StageSample(1024, 512, True, (0.15, 0.25)))
    fits = (
        StageFit(StageCost(c=0.002, gamma=1e-6, b=2e-4, a=3e-9, head=0.004), (0.001, -0.003), 0.998),
        StageFit(StageCost(c=0.001, gamma=0, b=3e-4, a=1e-9), (0.05, 0.0), 0.9),
    )
    lines = [line.split() for line in profile_text(Profile(key, samples, fits), Path("p.json")).splitlines()]
    assert ["0", "2.000", "1.0000", "200.00", "3.000", "4.000", "0.99800", "2.0%"] in lines
    assert ["1", "1.000", "0.0000", "300.00", "1.000", "0.000", "0.90000", "25.0%"] in lines
    assert ["0", "+", "512", "100.0", "(+1.0%)", "200.0", "(+25.0%)"] in lines
    assert ["1024", "+", "512", "sampled", "150.0", "(-2.0%)", "250.0", "(+0.0%)"] in lines
    assert ["saved", "to", "p.json"] in lines


def test_what_was_measured_is_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_llama(tmp_path / "model", layers=4, max_position_embeddings=256)
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path / "cache"))
    flags = ["--model", str(model), "--transport", "inproc", "--stages", "2", "--threads-per-stage", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["profile", *flags, "--dtype", "float32", "--kv-tokens", "1024"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    (file,) = (tmp_path / "cache" / "profiles").rglob("*.json")
    assert file.name == "2-2.json"
    assert out.splitlines()[-1] == f"saved to {file}"
    kept = msgspec.json.decode(file.read_bytes(), type=Profile)
    assert len(kept.fits) == 2
    for sample in kept.samples:
        assert f"{sample.history} + {sample.tokens}" in out
    assert "profiling: " in err

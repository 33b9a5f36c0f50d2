"""Steps without the model's own code around its layers: which models are recognised, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaModel

from actorpp.stages import native
from actorpp.stages.loader import load_stage_model
from actorpp.stages.messages import SamplingParams, Segment
from tests.exactness.chain import Chain, recorded_logits
from tests.exactness.families import FAMILIES
from tests.exactness.tiny import save_llama, save_tiny

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 kernels"
)

IDS = [3 + 7 * n % 300 for n in range(60)]


def _recognised(chain: Chain) -> list[bool]:
    return [host._plain is not None for host in chain.hosts]


def _logits(chain: Chain) -> torch.Tensor:
    """Rows after each of some chunks and decoded tokens of two requests."""
    chain.restart(16, 16)
    chain.admit(0, IDS, range(4))
    chain.admit(1, IDS[7:], range(4, 8))
    with recorded_logits() as rows:
        chain.prefill(1, 20, 20)
        chain.prefill(0, 50, 11, per_step=2)
        for n in range(4):
            chain.step(Segment(0, 50 + n, 1, IDS[n], True), Segment(1, 20 + n, 1, IDS[-n], True))
    return torch.stack(rows)


def _own_code(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The same with the model's own code around the layers."""
    with monkeypatch.context() as patched:
        for host in chain.hosts:
            patched.setattr(host, "_plain", None)
        return _logits(chain)


def _loaded_with(change: Callable[[Any], None]) -> Any:
    def load(spec: Any) -> Any:
        loaded = load_stage_model(spec)
        change(loaded.model)
        return loaded

    return patch("actorpp.stages.host.load_stage_model", load)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the model's own code runs")


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(("family", "stages"), [("llama with yarn and biases", 3), ("qwen2, tied", 2), ("mistral", 1)])
def test_none_of_a_models_own_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, stages: int, library: bool
) -> None:
    if not library:
        monkeypatch.setattr(native, "library", lambda: None)
    found = FAMILIES[family]
    chain = Chain(save_tiny(tmp_path, found.model_type, **found.options), stages, dtype="bfloat16")
    assert all(_recognised(chain))
    expected = _own_code(chain, monkeypatch)
    for host in chain.hosts:
        for module in (host.model, host.model.model, *host.model.model.layers):
            monkeypatch.setattr(module, "forward", _refuse)
    assert (_logits(chain) - expected).norm() < 0.01 * expected.norm()


def test_hidden_states_are_the_same_bits(tmp_path: Path) -> None:
    chain = Chain(save_llama(tmp_path), 2, dtype="bfloat16")
    host = chain.hosts[0]
    with patch.object(host, "forward", wraps=host.forward) as calls:
        chain.admit(0, IDS, range(4))
        chain.step(Segment(0, 0, 50))
    arguments = calls.call_args.args
    with torch.inference_mode():
        ours = host.forward(*arguments)
        host._plain = None
        assert torch.equal(ours, host.forward(*arguments))


def test_norm_and_head_see_the_wanted_rows_alone(tmp_path: Path) -> None:
    chain = Chain(save_llama(tmp_path), 2, dtype="bfloat16")
    seen: list[tuple[str, int]] = []

    def counted(name: str, part: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(rows: torch.Tensor) -> torch.Tensor:
            seen.append((name, len(rows)))
            return part(rows)

        return call

    plain = chain.hosts[-1]._plain
    assert plain is not None
    chain.hosts[-1]._plain = replace(plain, norm=counted("norm", plain.norm), head=counted("head", plain.head))
    for rid in range(2):
        chain.admit(rid, IDS, range(4 * rid, 4 * rid + 4))
    chain.admit(2, IDS, range(8, 12), SamplingParams(prompt_logprobs=0))
    chain.step(Segment(0, 0, 30), Segment(1, 0, 20))
    assert not seen
    assert len(chain.step(Segment(0, 30, 30, None, True), Segment(1, 20, 40, None, True)).ids) == 2
    assert seen == [("norm", 2), ("head", 2)]
    chain.step(Segment(0, 60, 1, 7, True), Segment(2, 0, 10))
    assert seen[2:] == [("norm", 11), ("head", 11)]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({"embedding_multiplier": 1.0, "logits_scaling": 1.0}, [True, True]),
        ({"embedding_multiplier": 3.0, "logits_scaling": 1.0}, [False, True]),
        ({"embedding_multiplier": 1.0, "logits_scaling": 4.0}, [True, False]),
        ({"embedding_multiplier": 3.0, "logits_scaling": 4.0}, [False, False]),
    ],
)
def test_scaled_embeddings_and_logits_keep_the_models_own_code(
    tmp_path: Path, factors: dict[str, float], expected: list[bool]
) -> None:
    """Layers of Llama's form, between what is not."""
    path = save_tiny(tmp_path, "granite", residual_multiplier=1.0, attention_multiplier=0.2, **factors)
    chain = Chain(path, 2, dtype="bfloat16")
    for host in chain.hosts:
        assert all("forward" in layer.__dict__ for layer in host.model.model.layers[host.spec.lo : host.spec.hi])
    assert _recognised(chain) == expected
    with patch("actorpp.stages.host.fusing", lambda layers: nullcontext()):
        own, exact = (Chain(path, 2, dtype=dtype) for dtype in ("bfloat16", "float32"))
    ours, theirs, oracle = map(_logits, (chain, own, exact))
    assert (ours - oracle).norm() < 1.1 * (theirs - oracle).norm()


def _one_position_on(model: Any, *args: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
    return _whole(model, *args, position_ids=position_ids + 1, **kwargs)


_whole = LlamaModel.forward


@pytest.mark.parametrize(
    "changed",
    [
        lambda: patch.object(LlamaModel, "forward", _one_position_on),
        lambda: _loaded_with(lambda model: setattr(model.model, "projector", nn.Identity())),
        lambda: _loaded_with(lambda model: setattr(model, "score", nn.Identity())),
    ],
)
def test_other_angles_and_further_modules_keep_the_models_own_code(tmp_path: Path, changed: Callable[[], Any]) -> None:
    with changed():
        assert _recognised(Chain(save_llama(tmp_path), 2, dtype="bfloat16")) == [False, False]


def test_layers_that_are_not_all_in_one_run_keep_the_models_own_code(tmp_path: Path) -> None:
    """Some of them in the library's one call, which does not bear a cache without an arena."""
    found = FAMILIES["smollm3, layers without rope"]
    path = save_tiny(tmp_path, found.model_type, **(found.options | {"hidden_size": 128}))
    assert _recognised(Chain(path, [1, 1, 3], dtype="bfloat16")) == [True, False, False]


def test_float32_keeps_the_models_own_code(tmp_path: Path) -> None:
    assert _recognised(Chain(save_llama(tmp_path), 1)) == [False]


def test_a_norm_of_another_form_computes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the attributes of the common one, but gives twice as much."""

    def change(model: Any) -> None:
        norm = model.model.norm
        own = norm.forward
        norm.forward = lambda rows: 2 * own(rows)

    with _loaded_with(change):
        chain = Chain(save_llama(tmp_path), 1, dtype="bfloat16")
    assert _recognised(chain) == [True]
    assert torch.equal(_own_code(chain, monkeypatch), _logits(chain))

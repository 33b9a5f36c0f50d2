"""What only a device can prove, in under five minutes: exact answers, copies that overlap compute, and TTFT.

    pytest -m gpu tests/gpu -s

Exactness is held to transformers in float32 on the CPU, by the policy of ``tests/exactness/policy.py``. The figures are
printed beside transformers' own on the same device, with random weights of a 1B-parameter llama. One device is enough;
NCCL, which needs one for each rank, is tested in ``tests/integration/transport/test_cuda.py``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actorpp import LLM, SamplingParams
from actorpp.stages.backend_choice import choose_backend
from actorpp.stages.backend_names import ON_CUDA
from actorpp.stages.backends import Scoring
from actorpp.stages.messages import Segment, Step
from actorpp.stages.streams import Streams
from actorpp.transport.sockets import close_context
from tests.exactness.chain import Chain, recorded_logits
from tests.exactness.oracle import Answer, Case, ask
from tests.exactness.policy import TokenTally, check_bfloat16
from tests.support.packed_step import check_step, packed_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"
NEW_TOKENS = 16
LENGTHS = (1, 63, 600, 1500)
ONE_SECOND = 1_500_000_000
"""Cycles that a device sleeps; about a second at 1.5 GHz."""
IN_PROCESS = {"transport": "inproc"}
GLOO = {"transport": "process", "tensor_transport": "gloo"}
ISL = (8192, 32768, 131072)
ONE_BILLION = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072 + 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 0,
}


@pytest.fixture(autouse=True)
def _end_of_context() -> Iterator[None]:
    """The ZeroMQ context lives as long as its process; here each test is to leave nothing behind."""
    yield
    close_context()


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(prompt_3000: list[int]) -> dict[str, list[int]]:
    return {f"{n} tokens": prompt_3000[n : 2 * n] for n in LENGTHS}


@pytest.fixture(scope="module")
def oracle(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path, prompts: dict[str, list[int]]
) -> dict[str, Answer]:
    cases = [Case(name, str(default_model), "float32", ids, [], NEW_TOKENS) for name, ids in prompts.items()]
    return ask(cases, tmp_path_factory.mktemp("oracle"))


@pytest.mark.parametrize(
    ("stages", "how"),
    [(1, IN_PROCESS), (3, IN_PROCESS), (2, GLOO)],
    ids=["1 in process", "3 in process", "2 processes over gloo"],
)
def test_the_oracles_tokens(
    stages: int,
    how: dict[str, str],
    default_model: Path,
    prompts: dict[str, list[int]],
    oracle: dict[str, Answer],
    tally: TokenTally,
) -> None:
    """All prompts in one batch, in chunks, with sampled ids on their way back while the next step runs."""
    options: dict[str, Any] = {"dtype": "float32", "device": DEVICE, "chunked_prefill_size": 256, "kv_tokens": 16384}
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for depth in (0, 2):
        with LLM(default_model, stages=stages, async_depth=depth, use_tqdm_on_load=False, **options, **how) as llm:
            outputs = llm.generate(list(prompts.values()), greedy, use_tqdm=False)
            assert llm.stats().pages_used == 0
        for (name, answer), output in zip(oracle.items(), outputs, strict=True):
            tally.check(f"{name}, depth {depth}", output.outputs[0].token_ids, answer.tokens, answer.logits)


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [64, 256])
@pytest.mark.parametrize("name", ["sdpa", *ON_CUDA])
def test_kernels_compute_a_packed_step(name: str, page_size: int) -> None:
    """Chunks, decode tokens and borders of pages, windows and soft-caps, in one call, out of pages full of NaN."""
    if name in ON_CUDA:
        pytest.importorskip(ON_CUDA[name][0])
    backend = choose_backend(name, torch.device(DEVICE))
    lengths = [(1000, 300), (17, 1), (6, 6), (page_size + 3, 1), (page_size, 2), (700, 1)]
    for width in (64, 128):
        shape: dict[str, Any] = {"heads": 12, "kv_heads": 4, "widths": (width, width)}
        query, kv = packed_step(lengths, page_size, dtype=torch.bfloat16, device=DEVICE, **shape)
        for scoring in (Scoring(0.1), Scoring(0.1, window=65), Scoring(0.1, softcap=3.0)):
            check_step(backend, query, kv, scoring, 0.03)


@pytest.mark.parametrize("name", ["sdpa", *ON_CUDA])
def test_half_precision_errs_hardly_more_than_the_cpu(name: str, default_model: Path, prompt_3000: list[int]) -> None:
    """The model through its stages in bfloat16: chunks, then decode tokens of several requests in one step."""
    if name in ON_CUDA:
        pytest.importorskip(ON_CUDA[name][0])
    logits = {}
    for key, options in {
        "exact": {"dtype": "float32"},
        "cpu": {"dtype": "bfloat16"},
        "cuda": {"dtype": "bfloat16", "device": DEVICE, "attention_backend": name},
    }.items():
        chain = Chain(default_model, 2, **options)
        lengths = (700, 90, 5)
        for rid, length in enumerate(lengths):
            chain.admit(rid, prompt_3000[rid : rid + length], range(12 * rid, 12 * rid + 12))
        with recorded_logits() as rows:
            for rid, length in enumerate(lengths):
                chain.prefill(rid, length, 256)
            for index in range(8):
                chain.step(*(Segment(rid, length + index, 1, 7000 + rid, True) for rid, length in enumerate(lengths)))
        logits[key] = torch.stack(rows).cpu()
    check_bfloat16(logits["cuda"], logits["cpu"], logits["exact"])


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_host_copy_does_not_wait_for_the_next_step() -> None:
    """The ids of one step arrive while the forward stream is busy with the one behind it, and they are right."""
    streams = Streams(torch.device(DEVICE))
    with streams.forward() as begun:
        ids = torch.arange(4096, device=DEVICE)
        mark = streams.finish(begun)
    with streams.forward() as begun:
        torch.cuda._sleep(ONE_SECOND)
        behind = streams.finish(begun)
    assert behind is not None
    host = streams.to_host(ids, mark)
    assert not behind.done.query(), "the copy waited for the step behind it"
    assert host.is_pinned()
    assert host.tolist() == list(range(4096))


def test_a_stage_fetches_while_it_computes(default_model: Path) -> None:
    """The same through a stage's host: of two steps, the first one's token comes before the second has ended."""
    chain = Chain(default_model, 1, device=DEVICE)
    (host,) = chain.hosts
    chain.admit(1, [504, 3575, 282, 4649, 314], range(1))
    chain.step(Segment(1, 0, 5, None, True))
    layer = host.model.model.layers[0]
    first = host.launch(decode_step(10, 5), None, {})
    hook = layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(ONE_SECOND))
    second = host.launch(decode_step(11, 6), None, {})
    hook.remove()
    ids, errors = host.fetch(first)
    assert not second.mark.done.query(), "fetching waited for the step behind"
    assert (len(ids), errors) == (1, {})
    assert len(host.fetch(second)[0]) == 1


def decode_step(seq: int, position: int) -> Step:
    return Step(0, seq, 0, (Segment(1, position, 1, 7042, True),))


# --- figures ----------------------------------------------------------------------------------------------------------


def test_ttft_beside_transformers(tmp_path: Path) -> None:
    """Printed, not held to a limit: seconds to the first token, the same random weights' shapes on both sides."""
    (tmp_path / "config.json").write_text(json.dumps(ONE_BILLION))
    rows = figures(tmp_path, DEVICE, ISL, stages=(1, 2), chunk=8192)
    print(f"\n{torch.cuda.get_device_name()}, 1B parameters, bfloat16: TTFT in seconds")
    for who, values in rows.items():
        print(f"{who:<28}" + "".join(f"{isl:>9} tokens {value:7.3f}" for isl, value in values.items()))
    assert all(value > 0 for values in rows.values() for value in values.values())


def figures(
    model: Path, device: str, isl: tuple[int, ...], stages: tuple[int, ...], chunk: int
) -> dict[str, dict[int, float]]:
    """Median seconds to the first token, by contestant and input length."""
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "device": device, "max_running_requests": 1}
    options |= {"chunked_prefill_size": chunk, "kv_tokens": max(isl) + 1024}
    rows: dict[str, dict[int, float]] = {}
    for count in stages:
        with LLM(model, stages=count, use_tqdm_on_load=False, **options, **IN_PROCESS) as llm:
            rows[f"actorpp, {count} in process"] = {n: median_of(lambda n=n: first_token_s(llm, n)) for n in isl}
    rows["transformers"] = transformers_s(model, device, isl)
    return rows


def first_token_s(llm: LLM, length: int) -> float:
    (output,) = llm.generate(ids_of(length), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    return output.metrics.ttft_s or 0.0


def transformers_s(model: Path, device: str, isl: tuple[int, ...]) -> dict[int, float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def first_token(length: int) -> float:
        ids = torch.tensor([ids_of(length)], device=device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = network(input_ids=ids, use_cache=True, logits_to_keep=1)
            int(out.logits[0, -1].argmax())  # waits for the device
        return time.perf_counter() - start

    return {length: median_of(lambda length=length: first_token(length)) for length in isl}


def median_of(measure: Any) -> float:
    """Of three, after one to warm up."""
    return statistics.median([measure() for _ in range(4)][1:])


def ids_of(length: int) -> list[int]:
    return [1 + (7 * i * i + 3 * i) % 511 for i in range(length)]

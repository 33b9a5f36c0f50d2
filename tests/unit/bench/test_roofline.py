"""A step beside its roofline: operations and bytes are the model's, and the table says which of them bounds what."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.bench.roofline import Machine, Part, Peaks, Sample, measure, report
from tests.bench.steps import Job
from tests.exactness.tiny import save_llama


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_the_parts_of_a_step_do_what_the_model_says(dtype: str, size: int, tmp_path: Path) -> None:
    model, job = save_llama(tmp_path, tied=True), Job("prefill of 5 after 3", 1, 3, 5)
    found = measure(model, dtype, [job, Job("decode", 2, 7, 1)], rounds=2, machine=Machine(dtype, 1 << 20))
    assert [len(samples) for samples in found.values()] == [2, 2]
    config = AutoConfig.from_pretrained(model)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    width = config.head_dim or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    layer = hidden * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    head = hidden * config.vocab_size  # of the last token alone
    weights = layers * layer + head
    for sample in found[job.name]:
        products, attention, rest = sample.parts.values()
        assert products.flop == 2 * (5 * layers * layer + head)
        assert size * weights < products.bytes < 2 * size * weights
        assert attention.flop == layers * 2 * (4 + 5 + 6 + 7 + 8) * 2 * queries  # what each token sees
        assert attention.bytes == layers * size * (8 * 2 * keys + 5 * 2 * queries)
        assert rest.seconds > 0


def test_the_table_names_the_bound_and_the_share() -> None:
    slow, fast = Peaks(100e9, 10e9), Peaks(200e9, 20e9)
    parts = {"products": Part(0.5, 10**9, 2 * 10**9), "attention": Part(0.01, 10**9, 10**6), "rest": Part(0.002)}
    _, products, attention, rest, flop, read = report({"decode": [Sample(parts, slow), Sample(parts, fast)]})
    assert products.split()[:5] == ["decode", "products", "500.0", "(500.0)", "1.00"]
    assert products.split()[-3:] == ["memory", "0.30", "(0.20-0.40)"]
    assert attention.split()[-3:] == ["operations", "0.75", "(0.50-1.00)"]
    assert rest.split() == ["rest", "2.0", "(2.0)"]
    assert flop.endswith("150 GFLOP/s (100-200)")
    assert read.endswith("15 GB/s (10-20)")

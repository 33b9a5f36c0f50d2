"""Every supported model type as a tiny random model, with the faults that concern it, and the prompts it is held to."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.exactness.oracle import Answer, Case, ask
from tests.exactness.tiny import VOCAB, save_tiny

LONG = 300
SHORT = (31, 1, 9, 23)
NEW_TOKENS = 24
SHORT_NEW_TOKENS = 4
WINDOW = 20
MANY = 32
MANY_LENGTH = 64


@dataclass(frozen=True)
class Family:
    """One tiny model.

    Attributes:
        options: What makes its config special.
        faults: Names in ``tests.exactness.faults.FAULTS`` that concern it, besides those that concern all.
        context_length: Of the stages: longrope depends on it, and a prompt that is longer is not asked.
        short: Lengths of the prompts that share steps.
        seed: Of weights and prompts; chosen so that the oracle repeats itself little and is never in two minds.
    """

    model_type: str
    options: dict[str, object] = field(default_factory=dict)
    faults: frozenset[str] = frozenset()
    context_length: int = 1024
    short: tuple[int, ...] = SHORT
    seed: int = 0


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.5 + 2.0 * index for index in range(8)],
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.2,
}
GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
WINDOWED = frozenset({"window one longer", "window one shorter"})
SCALED = frozenset({"no embedding scale"})

FAMILIES: dict[str, Family] = {
    "llama with llama3 rope": Family("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama with yarn and biases": Family("llama", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
    "qwen2": Family("qwen2"),
    "qwen2, tied": Family("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in the upper layers": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}, WINDOWED
    ),
    "qwen3, heads wider than the hidden states": Family("qwen3", {"head_dim": 32}, seed=1),
    "mistral without a window": Family("mistral", {"sliding_window": None}),
    "mistral": Family("mistral", {"sliding_window": WINDOW}, WINDOWED),
    "granite with its four factors": Family(
        "granite", GRANITE, SCALED | {"second stage scaled again", "second stage not scaled"}, seed=1
    ),
    "olmo2": Family("olmo2", seed=1),
    "phi3, fused projections": Family("phi3"),
    "smollm3, layers without rope": Family("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    # Tied and scaled, an embedding of the usual size would only ever repeat the last token.
    "gemma2, tied": Family(
        "gemma2",
        GEMMA | CAPPED | {"initializer_range": 0.05, "vectors": 1.0},
        WINDOWED | SCALED | {"no soft-cap on scores", "no soft-cap on logits"},
        seed=4,
    ),
    "gemma2": Family(
        "gemma2",
        GEMMA | CAPPED | {"tie_word_embeddings": False},
        WINDOWED | SCALED | {"no soft-cap on scores", "no soft-cap on logits"},
        seed=3,
    ),
    "gemma3_text": Family(
        "gemma3_text",
        GEMMA | {"sliding_window_pattern": 3, "initializer_range": 0.05, "vectors": 0.5},
        WINDOWED | SCALED,
        seed=3,
    ),
    "starcoder2": Family("starcoder2", NO_IDS | {"sliding_window": WINDOW}, WINDOWED, seed=1),
    "gpt_neox": Family("gpt_neox", seed=1),
    "qwen3_moe": Family("qwen3_moe", EXPERTS | {"num_experts": 8, "head_dim": 16}),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Family(
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "head_dim": 16}
        | {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
        WINDOWED | {"no sink"},
    ),
    "phi3 with longrope, short": Family(
        "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}, context_length=128
    ),
    "phi3 with longrope, long": Family(
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
        frozenset({"factors of a short context"}),
        short=(31, 9, 11, 23),  # transformers picks the factors by each prompt's own length
        seed=1,
    ),
    "deepseek_v3": Family("deepseek_v3", EXPERTS | MLA | {"q_lora_rank": 24}, seed=1),
    "deepseek_v3 with yarn, whole queries": Family(
        "deepseek_v3", EXPERTS | MLA | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale_all_dim": 1.0}}
    ),
}


ONE_OF_EACH_TYPE = list({family.model_type: name for name, family in FAMILIES.items()}.values())  # the last of each


@dataclass(frozen=True)
class Held:
    """A family's checkpoint with what it is asked, and the oracle's answers.

    Attributes:
        prompts: The longest first; the oracle goes on from it for ``NEW_TOKENS`` tokens.
        many: ``MANY`` further prompts of ``MANY_LENGTH`` tokens, over which errors in bfloat16 are measured.
        exact, bfloat16: What transformers says to them in float32 and in bfloat16: (MANY, MANY_LENGTH, vocab).
    """

    name: str
    family: Family
    path: Path
    prompts: list[list[int]]
    answers: list[Answer]
    many: list[list[int]]
    exact: torch.Tensor
    bfloat16: torch.Tensor

    @property
    def short(self) -> list[tuple[list[int], Answer]]:
        """The prompts that share steps, the oracle's answers with them: ``SHORT_NEW_TOKENS`` tokens at least."""
        count = len(self.family.short)
        return list(zip(self.prompts[-count:], self.answers[-count:], strict=True))


def prompts_of(family: Family) -> list[list[int]]:
    """The family's prompts."""
    rng = random.Random(family.seed)
    lengths = [*([LONG] if family.context_length >= LONG + NEW_TOKENS else []), *family.short]
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def many_prompts() -> list[list[int]]:
    """The prompts that errors in bfloat16 are measured over, the same for every family."""
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(MANY_LENGTH)] for _ in range(MANY)]


def prepare(names: Iterable[str], folder: Path) -> dict[str, Held]:
    """Save the tiny models under ``folder`` and ask the oracle about them, unless that is done."""
    families = {name: FAMILIES[name] for name in names}
    paths, cases = {}, []
    for index, (name, family) in enumerate(families.items()):
        path = folder / str(index)
        if not path.exists():
            save_tiny(path, family.model_type, seed=family.seed, **family.options)
        paths[name] = path
        for number, ids in enumerate(prompts_of(family)):
            tokens = SHORT_NEW_TOKENS if number else NEW_TOKENS
            cases.append(Case(f"{name}/{number}", str(path), "float32", ids, list(range(len(ids))), tokens))
        many, positions = [token for ids in many_prompts() for token in ids], list(range(MANY_LENGTH))
        for dtype in ("float32", "bfloat16"):
            cases.append(Case(f"{name}/{dtype}", str(path), dtype, many, positions, 0, rows=MANY))
    found = ask(cases, folder)
    held = {}
    for name, family in families.items():
        prompts = prompts_of(family)
        answers = [found[f"{name}/{number}"] for number in range(len(prompts))]
        exact, bfloat16 = (found[f"{name}/{dtype}"].at_positions for dtype in ("float32", "bfloat16"))
        held[name] = Held(name, family, paths[name], prompts, answers, many_prompts(), exact, bfloat16)
    return held

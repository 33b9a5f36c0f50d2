"""Tiny random checkpoints, made on the spot: small enough for seconds, spread enough that faults change tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
tqdm.monitor_interval = 0  # its thread would outlive the test

VOCAB = 320
SPREAD = 0.2


def save_tiny(folder: Path, model_type: str, *, seed: int = 0, vectors: float = 0.1, **options: object) -> Path:
    """Save a random causal LM of five layers with grouped heads (4 over 2) to ``folder`` and return it.

    Biases, norms and sinks begin as constants, so that one in the wrong place would not show: ``vectors`` is the spread
    of what is added to them.

    The initializer's range is large, for at the usual 0.02 a wrong position or a lost page changes hardly a token; and
    not larger, for at 0.3 transformers' own results differ by the whole tolerance between one chunk and many.
    """
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": SPREAD,
        "pad_token_id": 0,
        **options,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if vectors and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * vectors)
    model.save_pretrained(folder)
    return folder


def save_llama(folder: Path, *, tied: bool = False, layers: int = 5, seed: int = 0, **options: object) -> Path:
    """``save_tiny`` for the llama family."""
    return save_tiny(folder, "llama", seed=seed, num_hidden_layers=layers, tie_word_embeddings=tied, **options)

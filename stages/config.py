"""What this version can run, judged from a model's config.json alone. No torch here, and no files but JSON ones."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from actorpp.errors import CheckpointError, ConfigError, UnsupportedModelError

# Each of these is held to transformers' own answers, split and whole, by the exactness suite. Others are checked at
# first use (actorpp.stages.selfcheck).
SUPPORTED_MODEL_TYPES = frozenset(
    {"deepseek_v3", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2"}
    | {"phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2"}
)
REFUSED_MODEL_TYPES = {
    "gemma3n": "each layer has inputs of its own",
    "gemma3n_text": "each layer has inputs of its own",
    "qwen3_next": "its linear attention has a state that is no KV cache",
}
DTYPES = ("float32", "bfloat16", "float16")


def check_config(config: dict[str, Any], *, device: str | None = None) -> None:
    """Refuse a model by name, as far as its config tells.

    Args:
        config: The object in config.json.
        device: Where it shall run, if that is known.

    Raises:
        UnsupportedModelError: Its type or rotary embedding, or its quantisation on this device.
    """
    model_type = str(config.get("model_type"))
    if model_type in REFUSED_MODEL_TYPES or "text_config" in config:
        reason = REFUSED_MODEL_TYPES.get(model_type, "it reads more than text")
        allowed = ", ".join(sorted(SUPPORTED_MODEL_TYPES))
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported: {reason}; supported: {allowed}", param="model"
        )
    if "dynamic" in _rope_types(config):
        raise UnsupportedModelError(
            "rope type 'dynamic' is not supported: its factors depend on the batch", param="model"
        )
    quantisation = config.get("quantization_config")
    if quantisation is not None and device == "cpu":
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        raise UnsupportedModelError(f"the checkpoint is quantised ({method}): it needs a GPU, not a CPU", param="model")


def choose_dtype(requested: str, checkpoint_dtype: str, device: str) -> str:
    """The dtype to compute in.

    ``auto`` is the checkpoint's. On CPUs bfloat16 is taken only where the processor has it, and float16 never; what is
    left is float32. (CUDA devices below compute capability 8.0 turn bfloat16 into float16 when they load.)

    Raises:
        ConfigError: ``requested`` is not known.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise ConfigError(f"dtype {requested!r} is unknown; allowed: auto, {', '.join(DTYPES)}", param="dtype")
        return requested
    if checkpoint_dtype not in DTYPES:
        return "float32"
    if device == "cpu" and (checkpoint_dtype == "float16" or not _cpu_has_bfloat16()):
        return "float32"
    return checkpoint_dtype


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in ``file``; None if there is no such file.

    Raises:
        CheckpointError: The file is unreadable or holds something else.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is unreadable: {error}", param="model") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object", param="model")
    return value


def _rope_types(config: dict[str, Any]) -> set[str]:
    """The types of rotary embedding in a config: one, or one per kind of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    each = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return {str(value.get("rope_type", value.get("type"))) for value in each}


@cache
def _cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 natively (x86: AVX512-BF16 or AMX; Arm: bf16)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", text) is not None

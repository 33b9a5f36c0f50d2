"""The check of a model type that the exactness suite does not know: a tiny random model of its class, split and whole.

It has the same features as the model that is asked for, by its config, and small sizes. If two stages, fed in chunks
with two requests in a batch, give other logits than transformers gives for the whole, the type is refused with the
reason. The verdict is kept in the user's cache. It says nothing about the real weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from actorpp.errors import ActorppError, CheckpointError, UnsupportedModelError
from actorpp.stages.cache import build, cache_folder
from actorpp.stages.config import SUPPORTED_MODEL_TYPES, check_config, read_json
from actorpp.stages.host import StageHost
from actorpp.stages.kv import PageTable
from actorpp.stages.loader import quiet_transformers
from actorpp.stages.packed import pack
from actorpp.stages.spec import StageSpec

TOLERANCE = 1e-3  # of the logits' standard deviation; faults give a hundred times as much
SPREAD = 0.2
CHUNK, PAGE = 7, 4
LENGTHS = (45, 20)
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "sliding_window": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
FEWEST_LAYERS, MOST_LAYERS = 4, 12


def check_model_type(spec: StageSpec, cache: Path | None = None) -> None:
    """Return at once for a type of the suite; else check it, or recall what an earlier check has found.

    Args:
        spec: Of a stage that shall load the model; the check runs on its device.
        cache: Where verdicts are kept; the user's cache by default.

    Raises:
        UnsupportedModelError: Split and whole differ, or one of them cannot be run.
        CheckpointError: The files of the check cannot be written.
    """
    config = read_json(Path(spec.model_path) / "config.json") or {}
    model_type = str(config.get("model_type"))
    if model_type in SUPPORTED_MODEL_TYPES:
        return
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers {transformers.__version__} knows no model type {model_type!r}")
    check_config(config, device=spec.device)
    tiny = shrink(config, transformers.CONFIG_MAPPING[model_type].attribute_map)
    kind = torch.device(spec.device).type
    identity = hashlib.sha256(json.dumps([kind, transformers.__version__, tiny], sort_keys=True).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        identity.update(source.read_bytes())

    def make(scratch: Path, result: Path) -> None:
        (result / "verdict.json").write_text(json.dumps({"reason": find_fault(tiny, scratch, spec)}))

    cache = cache or cache_folder()
    try:
        folder = build(cache, f"selfcheck-{model_type}-{identity.hexdigest()[:16]}", make)
    except OSError as error:
        raise CheckpointError(f"model type {model_type!r} cannot be checked in {cache}: {error}") from error
    reason = (read_json(folder / "verdict.json") or {}).get("reason")
    if reason is not None:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported: it is none of the tested ones, and of a tiny random model of "
            f"its class {reason}",
            param="model",
        )


def shrink(config: dict[str, Any], own_names: dict[str, str]) -> dict[str, Any]:
    """The config of a tiny model with the same features: per-layer lists show every kind of layer that they name.

    Args:
        own_names: The class's name for a usual one, where it has one of its own.
    """
    usual = {own: name for name, own in own_names.items()}
    config = {usual.get(name, name): value for name, value in config.items()}
    layers = int(config.get("num_hidden_layers") or FEWEST_LAYERS)
    kinds = config.get("layer_types")
    count = min(FEWEST_LAYERS, layers)
    while isinstance(kinds, list) and count < min(layers, MOST_LAYERS) and set(kinds[:count]) != set(kinds):
        count += 1
    tiny: dict[str, Any] = {}
    for name, value in config.items():
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            tiny[name] = SIZES[name]
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            tiny[name] = None
        elif isinstance(value, list) and len(value) == layers:
            tiny[name] = value[:count]
        else:
            tiny[name] = value
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads:
        tiny["num_key_value_heads"] = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    for name in ("quantization_config", "auto_map", "architectures"):
        tiny.pop(name, None)
    return tiny | {"num_hidden_layers": count, "initializer_range": SPREAD, "dtype": "float32"}


def find_fault(tiny: dict[str, Any], folder: Path, spec: StageSpec) -> str | None:
    """Make the model, run it whole and split, and say in what they differ; None if they agree.

    Args:
        tiny: Its config.json.
        folder: Empty; the model's files are left in it.
        spec: Names the device and the attention backend.
    """
    prompts = [[(7 * n + n * n + length) % 311 + 2 for n in range(length)] for length in LENGTHS]
    try:
        with quiet_transformers():
            _save(tiny, folder)
            expected = _whole(folder, prompts, spec.device)
            found = _split(folder, prompts, spec, int(tiny["num_hidden_layers"]))
    except OSError:  # of this machine, not of the class: no verdict
        raise
    except ActorppError as error:
        return f"the stages say: {error.message}"
    except Exception as error:  # whatever the class raises means that it cannot be run here
        return f"{type(error).__name__} is raised: {(str(error).splitlines() or [''])[0]}"
    for mine, whole in zip(found, expected, strict=True):
        difference = float((mine - whole).abs().max() / whole.std())
        if not difference <= TOLERANCE:  # also if it is no number
            return f"the logits differ by {difference:.2g} of their standard deviation between stages and whole"
    return None


def _save(tiny: dict[str, Any], folder: Path) -> None:
    """A random model of the class; vectors are spread, too, so that a norm or bias in the wrong place shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**tiny)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * SPREAD)
    model.save_pretrained(folder)


@torch.inference_mode()
def _whole(folder: Path, prompts: Sequence[Sequence[int]], device: str) -> list[torch.Tensor]:
    """transformers' logits (length, vocab) for each prompt."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    return [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in prompts]


@torch.inference_mode()
def _split(folder: Path, prompts: Sequence[Sequence[int]], spec: StageSpec, layers: int) -> list[torch.Tensor]:
    """The same from two stages, in chunks that share steps; pages lie in turn."""
    ranges = ((0, 1), (1, layers)) if layers > 1 else ((0, 1),)
    first = StageSpec(
        stage=0,
        num_stages=len(ranges),
        lo=0,
        hi=1,
        model_path=str(folder),
        dtype="float32",
        device=spec.device,
        threads=spec.threads,
        page_size=PAGE,
        context_length=max(LENGTHS),
        attention_backend=spec.attention_backend,
    )
    hosts = [
        StageHost(msgspec.structs.replace(first, stage=stage, lo=lo, hi=hi)) for stage, (lo, hi) in enumerate(ranges)
    ]
    pages = -(-max(LENGTHS) // PAGE)
    for host in hosts:
        host.load()
        host.allocate(pages * len(prompts))
    tables = [PageTable(range(index, pages * len(prompts), len(prompts)), PAGE) for index in range(len(prompts))]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(LENGTHS), CHUNK):
        cuts = {index: ids[start : start + CHUNK] for index, ids in enumerate(prompts) if start < len(ids)}
        parts = [(tables[index], start, len(cut)) for index, cut in cuts.items()]
        ids = torch.tensor([[token for cut in cuts.values() for token in cut]], device=spec.device)
        hidden: torch.Tensor | None = None
        for host in hosts:
            cache, positions = pack(parts, host.arena)
            rows = list(range(ids.shape[1])) if host.is_last else None
            hidden = host.forward(ids if host.is_first else None, hidden, positions, cache, rows)
        if hidden is not None:
            sizes = [len(cut) for cut in cuts.values()]
            for index, logits in zip(cuts, torch.split(hidden, sizes), strict=True):
                found[index].append(logits)
    return [torch.cat(rows) for rows in found]

"""Finds the checkpoint that a model name means and reads what the driver needs from it. No torch here.

Downloads and conversions run in a child process (see ``actorpp.stages.convert``), so that the driver stays light and
can end them at any moment.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from actorpp.errors import CheckpointError, ModelNotFoundError
from actorpp.stages.cache import DEFAULT_NAME, cache_folder
from actorpp.stages.config import check_config, read_json
from actorpp.stages.fetching import Progress, fetch_checkpoint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in a local folder.

    Attributes:
        path: The folder: config.json, safetensors and tokenizer files.
        config: The model's config.json.
        num_layers: Decoder layers.
        max_position_embeddings: Longest context that the model was made for, in tokens.
        vocab_size: Ids are below this.
        hidden_size: Width of the hidden states.
        eos_token_ids: Ids that end a text.
        dtype: Name of the checkpoint's torch dtype.
        model_type: Family name, such as ``llama``.
        tokenizer: The folder's tokenizer.json, or None if it has none.
    """

    path: Path
    config: dict[str, Any]
    num_layers: int
    max_position_embeddings: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    model_type: str
    tokenizer: Path | None


async def resolve(
    model: str | None = None,
    *,
    device: str = "cpu",
    load_format: str = "auto",
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Checkpoint:
    """Make the checkpoint of ``model`` local and read it. Cancelling ends the child process and leaves nothing behind.

    Args:
        model: None for the embedded default model; else a local folder, a .gguf file, or a Hugging Face hub id.
        device: Where the model shall run; FP8 and other quantised checkpoints are refused on CPUs.
        load_format: With ``dummy`` a folder needs config.json alone.
        progress: Called with (phase, done, total) while something is fetched or converted; bytes or parts.
        cache: Folder for converted checkpoints; the user's by default.

    Raises:
        ModelNotFoundError: There is no such model, or it cannot be downloaded.
        UnsupportedModelError: The model's type or quantisation is refused, by name.
        CheckpointError: Files are damaged or missing, or the disk is full.
    """
    what = _meaning(model, cache or cache_folder())
    folder = what if isinstance(what, Path) else await fetch_checkpoint(what, cache=cache, progress=progress)
    return read_checkpoint(folder, device=device, load_format=load_format)


def _meaning(model: str | None, cache: Path) -> Path | list[str]:
    """What a model name means: a local folder, or the arguments of the child process that makes one."""
    if model is None:
        made = cache / DEFAULT_NAME
        return made if made.is_dir() else ["default"]
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return ["gguf", str(path.resolve())]
    if path.suffix != ".gguf" and not path.exists() and _HUB_ID.fullmatch(model):
        return ["hub", model]
    raise ModelNotFoundError(
        f"no model {model!r}: give a folder with config.json, a .gguf file, or a hub id such as org/name", param="model"
    )


def read_checkpoint(folder: Path, *, device: str = "cpu", load_format: str = "auto") -> Checkpoint:
    """Read a local checkpoint's configuration, without its weights. See ``resolve`` for arguments and errors."""
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelNotFoundError(f"{folder} has no config.json, so it is no model's folder", param="model")
    check_config(config, device=device)
    if load_format != "dummy" and not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no .safetensors files", param="model")
    generation = read_json(folder / "generation_config.json") or {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    tokenizer = folder / "tokenizer.json"
    try:
        return Checkpoint(
            path=folder.resolve(),
            config=config,
            num_layers=int(config["num_hidden_layers"]),
            max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            model_type=str(config["model_type"]),
            tokenizer=tokenizer if tokenizer.is_file() else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} lacks or garbles {error}", param="model") from error

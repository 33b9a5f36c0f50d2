"""Builds the part of a transformers model that one stage computes, with its own weights only.

The model's class is subclassed: layers outside the stage's range become pass-throughs, and so do embedding, norm and
head where they belong to other stages; then transformers' own ``from_pretrained`` loads what is left, with all its
conversions. Layer indices stay global. It does not run the model.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as hf_logging

from actorpp.errors import CheckpointError, UnsupportedModelError
from actorpp.stages.attention import ATTENTION_NAME, register
from actorpp.stages.config import check_config, choose_dtype
from actorpp.stages.linears import PackedLinear, pack_linears
from actorpp.stages.spec import StageSpec

# transformers sets process-wide state while it loads (default dtype, names of tied weights): one load at a time.
_LOADING = threading.Lock()


class LoadedModel(NamedTuple):
    """A stage's model, in evaluation mode on its device.

    Attributes:
        model: The causal LM with pass-throughs; it is called as a whole.
        layers: The local decoder layers; received hidden states come in at the first.
        loaded_bytes: Bytes of the weights that were materialised; tied ones count once.
    """

    model: Any
    layers: list[nn.Module]
    loaded_bytes: int


class PassThrough(nn.Module):
    """Stands where another stage's module is: returns what it was given."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The first argument, unchanged."""
        return hidden_states


class _ValuesOnCPU(TorchFunctionMode):
    """Makes what rotary frequencies are computed from on the CPU, also where modules are built on the meta device.

    There, torch computes with its Python references, and they bring its compiler: two seconds of a CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.arange, torch.linspace, torch.tensor) and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def load_stage_model(spec: StageSpec) -> LoadedModel:
    """Load the stage's own weights.

    Raises:
        UnsupportedModelError: The model's type is refused, or its rotary embedding depends on the batch.
        CheckpointError: A file is unreadable, or tensors are missing, of the wrong shape, or of no known model part.
    """
    with _LOADING, quiet_transformers():
        try:
            config = transformers.AutoConfig.from_pretrained(spec.model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{spec.model_path}: unreadable config.json: {_line(error)}") from error
        whole = _causal_lm_class(config)
        dtype = getattr(torch, device_dtype(spec, config))
        register()
        stage_class = _stage_class(whole, spec)
        arguments: dict[str, Any] = {
            "config": config,
            "dtype": dtype,
            "attn_implementation": ATTENTION_NAME,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # they are reported, and refused below by name
        }
        if spec.device != "cpu":
            arguments["device_map"] = {"": spec.device}
        try:
            if spec.load_format == "dummy":
                weights = _dummy_weights(stage_class, config, dtype, spec)
                model, info = stage_class.from_pretrained(None, state_dict=weights, **arguments)
            else:
                model, info = stage_class.from_pretrained(
                    spec.model_path, local_files_only=True, use_safetensors=True, **arguments
                )
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{spec.model_path}: {_line(error)}") from error
        _check_keys(info, _state_shapes(whole, config).keys(), spec.model_path)
        _fix_longrope(model, spec.context_length)
    base = getattr(model, model.base_model_prefix)
    storages = {p.untyped_storage().data_ptr(): p.nbytes for p in model.parameters()}
    pack_linears(model)
    if isinstance(model.get_output_embeddings(), PackedLinear) and not spec.is_first:
        _pass_through(
            base, lambda name, module: module is base.get_input_embeddings()
        )  # tied, it was there for the head
    return LoadedModel(model, list(base.layers[spec.lo : spec.hi]), sum(storages.values()))


def device_dtype(spec: StageSpec, config: Any) -> str:
    """Name of the dtype that the stage computes in; on CUDA, bfloat16 becomes float16 below compute capability 8.0."""
    checkpoint_dtype = str(config.dtype or "float32").removeprefix("torch.")
    name = choose_dtype(spec.dtype, checkpoint_dtype, spec.device)
    if spec.dtype == "auto" and name == "bfloat16" and spec.device.startswith("cuda"):
        major, _ = torch.cuda.get_device_capability(spec.device)
        return "bfloat16" if major >= 8 else "float16"
    return name


def _causal_lm_class(config: Any) -> Any:
    check_config(config.to_dict())
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported: transformers has no causal language model of it",
            param="model",
        ) from None


def _stage_class(whole: Any, spec: StageSpec) -> Any:
    """A subclass of ``whole`` that keeps the stage's own modules.

    It keeps the name and module of its base, or transformers would take it for custom code and leave out conversions.
    """
    last = spec.is_last

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        with no_init_weights(), _ValuesOnCPU():
            whole.__init__(self, config, *args, **kwargs)
        base = getattr(self, self.base_model_prefix)
        if not isinstance(getattr(base, "layers", None), nn.ModuleList):
            raise UnsupportedModelError(f"the layers of {whole.__name__} are not where they are looked for")
        for index in range(len(base.layers)):
            if not spec.lo <= index < spec.hi:
                base.layers[index] = PassThrough()
        if not (spec.is_first or (last and config.tie_word_embeddings)):
            _pass_through(base, lambda name, module: module is base.get_input_embeddings())
        if not last:
            _pass_through(base, lambda name, module: "norm" in name)
            _pass_through(self, lambda name, module: module is self.get_output_embeddings())
        self.post_init()

    body: dict[str, Any] = {"__init__": init, "__module__": whole.__module__, "__qualname__": whole.__qualname__}
    if not last:
        body["_tied_weights_keys"] = {}
    return type(whole.__name__, (whole,), body)


def _fix_longrope(model: nn.Module, context_length: int) -> None:
    """Pick the factors of longrope once, from the context length.

    transformers picks them anew in each forward from the largest position, so that requests would change one another's
    keys, and chunks of one prompt would not fit together.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict) and "longrope" in rope_type.values():
            raise UnsupportedModelError("longrope for some kinds of layers only is not supported", param="model")
        if rope_type == "longrope":
            rotary: Any = module
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
                rotary.config, rotary.inv_freq.device, seq_len=context_length
            )
            rotary.inv_freq.copy_(frequencies)
            rotary.rope_type = "longrope, fixed"  # not a name on which transformers would pick again


def _pass_through(parent: nn.Module, chosen: Callable[[str, nn.Module], bool]) -> None:
    """Take the chosen children out; families call them by different names."""
    for name in [name for name, module in parent.named_children() if chosen(name, module)]:
        setattr(parent, name, PassThrough())


def _state_shapes(model_class: Any, config: Any) -> dict[str, torch.Tensor]:
    """The state dict of ``model_class``, without memory behind it."""
    with torch.device("meta"), no_init_weights(), _ValuesOnCPU():
        state: dict[str, torch.Tensor] = model_class(config).state_dict()
    return state


def _dummy_weights(stage_class: Any, config: Any, dtype: torch.dtype, spec: StageSpec) -> dict[str, torch.Tensor]:
    """Random weights that depend on the seed and each tensor's own name: every split of a model gets the same."""
    tied = stage_class._tied_weights_keys if config.tie_word_embeddings else {}
    weights = {}
    for name, shape_only in _state_shapes(stage_class, config).items():
        if name in (tied or {}):
            continue
        if shape_only.dim() == 1:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            weights[name] = fill(shape_only.shape, dtype=dtype)
            continue
        digest = hashlib.blake2b(f"{spec.seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        random = torch.empty(shape_only.shape).normal_(0.0, config.initializer_range, generator=generator)
        weights[name] = random.to(dtype)
    return weights


def _check_keys(info: dict[str, Any], known: Any, path: str) -> None:
    """Raise for tensors that are missing, of another shape, or that no stage of the model would load."""
    mismatched = {entry[0] for entry in info["mismatched_keys"]}
    for what, names in (
        ("misses", info["missing_keys"]),
        ("has the wrong shape for", mismatched),
        ("has tensors of no part of the model:", set(info["unexpected_keys"]) - set(known)),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"checkpoint {Path(path).name} {what} {shown}{more}")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and loading report, which lists the other stages' tensors, off stderr."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    """The first line of an error's text."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "conversion of the weights" in line:  # it refers to a report that is not shown
        return "tensors that belong together, such as the experts of a layer, are missing or do not fit"
    return line

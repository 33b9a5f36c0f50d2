"""Which attention backend a stage computes with."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from actorpp.errors import ConfigError
from actorpp.stages.backends import AttentionBackend, FlashBackend, SdpaBackend
from actorpp.stages.cuda_backends import FlashAttnBackend, FlashInferBackend

ON_CUDA: dict[str, tuple[str, str, Callable[[], AttentionBackend]]] = {
    "flashinfer": ("flashinfer", "flashinfer-python", FlashInferBackend),
    "flash_attn": ("flash_attn", "flash-attn", FlashAttnBackend),
}
"""By name: module, package and backend; ``auto`` takes the first that is installed. FlashInfer stands first because it
reads pages of any size in place."""


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called ``name``.

    ``auto`` is ``flash`` on CPUs; on CUDA from compute capability 8.0 on ``flashinfer`` or ``flash_attn``, if one is
    installed; else ``sdpa``.

    Raises:
        ConfigError: The backend is for another kind of device, or not installed.
    """
    if name == "sdpa":
        return SdpaBackend()
    if name == "flash" or (name == "auto" and device.type == "cpu"):
        if device.type != "cpu":
            raise ConfigError(
                "attention backend 'flash' is the CPU kernel; use 'sdpa' elsewhere", param="attention_backend"
            )
        return FlashBackend()
    if name == "auto":
        able = (
            device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
        )
        installed = [make for module, _, make in ON_CUDA.values() if able and find_spec(module)]
        return installed[0]() if installed else SdpaBackend()
    module, package, make = ON_CUDA[name]
    if device.type != "cuda":
        raise ConfigError(f"attention backend {name!r} needs a CUDA device", param="attention_backend")
    if not find_spec(module):
        raise ConfigError(
            f"attention backend {name!r} is not installed: pip install {package}", param="attention_backend"
        )
    return make()

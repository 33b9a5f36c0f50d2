"""Which attention backend a stage computes with."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from actorpp.stages.backend_names import ON_CUDA, check_backend, resolved
from actorpp.stages.backends import AttentionBackend, FlashBackend, SdpaBackend
from actorpp.stages.cuda_backends import FlashAttnBackend, FlashInferBackend
from actorpp.stages.native_backend import NativeBackend

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SdpaBackend,
    "flash": FlashBackend,
    "native": NativeBackend,
    "flashinfer": FlashInferBackend,
    "flash_attn": FlashAttnBackend,
}


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called ``name``.

    ``auto`` is ``native`` on CPUs that have it, else ``flash``; on CUDA from compute capability 8.0 on ``flashinfer``
    or ``flash_attn``, if one is installed; else ``sdpa``.

    Raises:
        ConfigError: As ``check_backend``.
    """
    check_backend(name, device.type)
    name = resolved(name, device.type)
    return BACKENDS[_automatic_elsewhere(device) if name == "auto" else name]()


def _automatic_elsewhere(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0):
        return next((name for name, (module, _) in ON_CUDA.items() if find_spec(module)), "sdpa")
    return "sdpa"

"""Which attention backends there are, and what each needs. Names only: no torch, so the driver checks them too."""

from __future__ import annotations

from importlib.util import find_spec

from actorpp.errors import ConfigError
from actorpp.stages import native

ON_CUDA = {"flashinfer": ("flashinfer", "flashinfer-python"), "flash_attn": ("flash_attn", "flash-attn")}
"""By name: module and package. ``auto`` takes the first that is installed; FlashInfer stands first because it reads
pages of any size in place."""


def resolved(name: str, device_type: str) -> str:
    """What ``auto`` is on CPUs: ``native`` on those that have it, else ``flash``. Any other name, and ``auto`` on a
    device that only the stages can ask, is as given."""
    if name == "auto" and device_type == "cpu":
        return "native" if native.library() else "flash"
    return name


def check_backend(name: str, device_type: str) -> None:
    """Whether stages on this kind of device can compute with the backend ``name``.

    Raises:
        ConfigError: The backend is for another kind of device, or not installed.
    """
    if name == "flash" and device_type != "cpu":
        raise ConfigError(
            "attention backend 'flash' is the CPU kernel; use 'sdpa' elsewhere", param="attention_backend"
        )
    if name == "native" and (device_type != "cpu" or native.library() is None):
        raise ConfigError(
            "attention backend 'native' needs an x86 CPU with AMX or AVX512-BF16, and a C compiler at installation",
            param="attention_backend",
        )
    if name not in ON_CUDA:
        return
    module, package = ON_CUDA[name]
    if device_type != "cuda":
        raise ConfigError(f"attention backend {name!r} needs a CUDA device", param="attention_backend")
    if not find_spec(module):
        raise ConfigError(
            f"attention backend {name!r} is not installed: pip install {package}", param="attention_backend"
        )

"""actorpp: an asyncio actor runtime for pipeline-parallel LLM inference on long prompts.

The package root stays empty of work: nothing is imported until it is asked for, and never torch. What is named here can
be had from it; import the rest from its subpackage, for instance ``from actorpp.runtime import Actor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorpp.config import EngineConfig
    from actorpp.engine import Engine
    from actorpp.llm import LLM, SamplingParams
    from actorpp.serving.gateway import Gateway

    __version__: str

__all__ = ["LLM", "Engine", "EngineConfig", "Gateway", "SamplingParams"]

_MODULES = {
    "LLM": "actorpp.llm",
    "SamplingParams": "actorpp.llm",
    "Engine": "actorpp.engine",
    "EngineConfig": "actorpp.config",
    "Gateway": "actorpp.serving.gateway",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("actorpp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])

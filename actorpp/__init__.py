"""actorpp: an asyncio actor runtime for pipeline-parallel LLM inference on long prompts.

The package root stays empty of work: nothing is imported until it is asked for, and never torch. Import what you use
from its subpackage, for instance ``from actorpp.runtime import Actor``.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("actorpp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Writes a long text to prefill: Python's own language reference, cut to fit the default model's context.

    python examples/long_text.py [LONG.txt [CHARACTERS]]

It comes from ``pydoc_data.topics``, which every Python has. The default model counts 4.1 to 4.3 characters of it per
token, so the default of 31,000 characters is about 7,300 tokens; 8,192 less 64 for the answer are there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

CHARACTERS = 31_000


def long_text(characters: int = CHARACTERS) -> str:
    """The first ``characters`` of the language reference, topics in alphabetical order."""
    return "\n\n".join(text for _, text in sorted(topics.items()))[:characters]


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "LONG.txt")
    text = long_text(int(sys.argv[2]) if len(sys.argv) > 2 else CHARACTERS)
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(text)} characters")

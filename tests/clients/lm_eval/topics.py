"""Writes rows for ``actorpp_topics``: paragraphs that every Python has, each cut in two.

python topics.py > topics.jsonl
"""

from __future__ import annotations

import json
import sys
from pydoc_data.topics import topics

ROWS = 24
CONTEXT, CONTINUATION = 600, 20  # characters


def main() -> None:
    for name in sorted(topics)[:: len(topics) // ROWS][:ROWS]:
        text = " ".join(topics[name].split())[: CONTEXT + CONTINUATION]
        cut = text.rfind(" ", 0, len(text) * CONTEXT // (CONTEXT + CONTINUATION))
        sys.stdout.write(json.dumps({"context": text[:cut], "continuation": text[cut:]}) + "\n")


if __name__ == "__main__":
    main()

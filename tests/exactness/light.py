"""A program for test_imports.py: ``python -m tests.exactness.light ANSWERS CHECKPOINT…``.

It imports transformers as a stage process does, computes an answer for each checkpoint, and prints what it imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROMPT = [5 + (7 * n * n + 3 * n) % 89 for n in range(40)]
CHUNK = 17


def main(answers: Path, checkpoints: list[Path]) -> None:
    from actorpp.stages.imports import import_lightly

    import_lightly("cpu")
    from safetensors.torch import save_file

    save_file({str(number): answer(path) for number, path in enumerate(checkpoints)}, answers)
    print(*sys.modules)


def answer(path: Path) -> object:
    """Logits (rows, vocab) of a short prompt on two stages, in chunks, with one decoded token."""
    import torch

    from tests.exactness.chain import Chain, recorded_logits

    chain = Chain(path, 2, page_size=16, context_length=64)
    chain.admit(1, PROMPT, range(1, 5))
    with recorded_logits() as rows:
        chain.prefill(1, len(PROMPT), CHUNK)
        chain.decode(1, len(PROMPT), 2)
    return torch.stack(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])

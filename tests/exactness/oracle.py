"""The oracle: transformers itself, run as it comes, in a process of its own.

``ask`` starts ``python -m tests.exactness.oracle`` once for a list of cases; the answers lie in one safetensors file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from tests.support.workers import THREADS

ROOT = Path(__file__).resolve().parents[2]


class Case(msgspec.Struct, frozen=True):
    """One prompt to complete greedily, or several in one batch of which only logits are wanted.

    Attributes:
        name: Unique in the list.
        path: The checkpoint's folder.
        dtype: Name of the torch dtype.
        ids: The prompt; or ``rows`` prompts of the same length, one after another.
        positions: Prompt positions whose next-token logits are wanted.
        new_tokens: Tokens to generate.
        forced: Generate these instead of the greedy ones, so that two runs can be compared.
    """

    name: str
    path: str
    dtype: str
    ids: list[int]
    positions: list[int]
    new_tokens: int
    forced: list[int] = []
    rows: int = 1


class Answer(msgspec.Struct, frozen=True):
    """What transformers says to a case.

    Attributes:
        at_positions: (rows, len(positions), vocab) float32 logits; without ``rows`` for one prompt.
        logits: (new_tokens, vocab) float32 logits of the generated tokens.
        tokens: The generated tokens.
    """

    at_positions: torch.Tensor
    logits: torch.Tensor
    tokens: list[int]


def ask(cases: list[Case], folder: Path) -> dict[str, Answer]:
    """Answers by case name, from one child process; ``folder`` keeps the files, and who asks the same is told again."""
    text = msgspec.json.encode(cases)
    asked = folder / f"{hashlib.sha256(text).hexdigest()[:16]}.json"
    answered = asked.with_suffix(".safetensors")
    if not answered.exists():
        asked.write_bytes(text)
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.exactness.oracle", str(asked), str(answered)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the oracle failed: {done.stderr[-2000:]}")
    found = load_file(answered)
    return {
        case.name: Answer(
            found[f"{case.name}/positions"], found[f"{case.name}/logits"], found[f"{case.name}/tokens"].tolist()
        )
        for case in cases
    }


def main(asked: Path, answered: Path) -> None:
    """Answer the cases in the file ``asked``."""
    from transformers import AutoModelForCausalLM

    cases = msgspec.json.decode(asked.read_bytes(), type=list[Case])
    tensors: dict[str, torch.Tensor] = {}
    loaded: tuple[str, str] | None = None
    model = None
    for case in cases:
        if loaded != (case.path, case.dtype):
            model = AutoModelForCausalLM.from_pretrained(case.path, dtype=getattr(torch, case.dtype))
            loaded = (case.path, case.dtype)
        tensors |= {f"{case.name}/{key}": value for key, value in answer(model, case).items()}
    save_file(tensors, answered)


@torch.inference_mode()
def answer(model: object, case: Case) -> dict[str, torch.Tensor]:
    """Prefill in one go, then one token at a time with transformers' own cache."""
    keep = torch.tensor([*case.positions, len(case.ids) // case.rows - 1])
    out = model(input_ids=torch.tensor(case.ids).view(case.rows, -1), use_cache=True, logits_to_keep=keep)  # type: ignore[operator]
    kept = out.logits.float()
    rows, logits, tokens = kept if case.rows > 1 else kept[0], [], []
    current = rows[..., -1, :]
    for index in range(case.new_tokens):
        logits.append(current)
        tokens.append(case.forced[index] if case.forced else int(current.argmax()))
        if index + 1 < case.new_tokens:
            out = model(input_ids=torch.tensor([tokens[-1:]]), cache=out.cache, use_cache=True)  # type: ignore[operator]
            current = out.logits[0, -1].float()
    return {
        "positions": rows[..., :-1, :].contiguous(),
        "logits": torch.stack(logits) if logits else torch.empty(0, rows.shape[-1]),
        "tokens": torch.tensor(tokens, dtype=torch.int64),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

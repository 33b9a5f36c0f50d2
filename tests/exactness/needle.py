"""A needle in a haystack: where transformers finds a fact in a long context, we find it, with 1, 2 and 4 stages.

    python -m tests.exactness.needle [--length 8000] [--depths 5] [--stages 1 2 4] [--dtype bfloat16] [--inproc]

The haystack is real text; the needle is one sentence in it, at depths from its beginning to its end; the prompt ends
with the sentence's beginning, for a model of 135M parameters continues what it has read better than it answers
questions. transformers has a process of its own, and gets one prompt at a time. The full run takes six minutes on
two cores that have bfloat16; a small one is part of the test suite.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from actorpp import LLM, SamplingParams
from actorpp.stages.checkpoint import resolve
from tests.exactness.oracle import Case, ask

SECRET = "48213"
NEEDLE = f"\n\nThe secret number of the blue house is {SECRET}.\n\n"
QUESTION = "\n\nThe secret number of the blue house is"
NEW_TOKENS = 8
DATA = Path(__file__).resolve().parents[1] / "data" / "prompt_3000.json"


@dataclass
class Search:
    """One needle: where it lies (0 is the beginning, 1 the end), and the answers by who gave them."""

    depth: float
    prompt: list[int]
    answers: dict[str, str] = field(default_factory=dict)

    def found_by(self, who: str) -> bool:
        return SECRET in self.answers[who]


def haystacks(tokenizer: Tokenizer, length: int, depths: Sequence[float]) -> list[Search]:
    """Prompts of exactly ``length`` tokens."""
    needle, question = (tokenizer.encode(text, add_special_tokens=False).ids for text in (NEEDLE, QUESTION))
    hay: list[int] = json.loads(DATA.read_text())["ids"]
    room = length - len(needle) - len(question)
    hay = (hay * (room // len(hay) + 1))[:room]
    return [
        Search(depth, [*hay[: int(depth * room)], *needle, *hay[int(depth * room) :], *question]) for depth in depths
    ]


def search(
    model: Path, length: int, depths: Sequence[float], stages: Sequence[int], dtype: str, **options: object
) -> list[Search]:
    """Ask transformers and each pipeline about each needle.

    Args:
        dtype: Of all of them.
        stages: Numbers of stages; their answers are under ``"1 stages"`` and so on, the oracle's under "transformers".
        options: Further options of the LLMs.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    searches = haystacks(tokenizer, length, depths)
    cases = [Case(str(s.depth), str(model), dtype, s.prompt, [], NEW_TOKENS) for s in searches]
    with tempfile.TemporaryDirectory() as folder:
        oracle = ask(cases, Path(folder))
    for s in searches:
        s.answers["transformers"] = tokenizer.decode(oracle[str(s.depth)].tokens)
    tell("transformers", searches)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for count in stages:
        with LLM(model, stages=count, dtype=dtype, use_tqdm_on_load=False, **options) as llm:
            for s, output in zip(searches, llm.generate([s.prompt for s in searches], greedy), strict=True):
                s.answers[f"{count} stages"] = output.outputs[0].text
        tell(f"{count} stages", searches)
    return searches


def tell(who: str, searches: Sequence[Search]) -> None:
    """A line as soon as one has answered: the whole takes long."""
    found = [f"{s.depth:.0%}" for s in searches if s.found_by(who)]
    print(f"{who}: found at {', '.join(found) or 'no depth'}", flush=True)


def main() -> int:
    """Search, print, and return 1 if a needle was lost that transformers finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8000, help="tokens of the prompt (default 8000)")
    parser.add_argument("--depths", type=int, default=5, help="needles, evenly over the context (default 5)")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4], help="default 1 2 4")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="default bfloat16")
    parser.add_argument("--inproc", action="store_true", help="stages in this process instead of processes")
    options = parser.parse_args()
    depths = [index / max(1, options.depths - 1) for index in range(options.depths)]
    began = time.monotonic()
    model = asyncio.run(resolve()).path
    transport = "inproc" if options.inproc else "process"
    searches = search(model, options.length, depths, options.stages, options.dtype, transport=transport)
    lost = 0
    for s in searches:
        for who, answer in s.answers.items():
            missed = s.found_by("transformers") and not s.found_by(who)
            lost += missed
            verdict = "LOST" if missed else "found" if s.found_by(who) else "not found"
            print(f"depth {s.depth:4.0%}  {who:<13} {verdict:<10} {answer!r}")
    print(f"{options.length} tokens, {lost} lost, {time.monotonic() - began:.0f} s")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())

"""Many malformed messages: ``python -m tests.fuzz [--messages N] [--seed S] [codecs|inner|clients]``.

Prints a line of counts for each fuzzer. Exits non-zero, with the seed, at the first message that does harm.
"""

from __future__ import annotations

import argparse
import secrets

from tests.fuzz.runs import RUNS


def main() -> int:
    """Run the fuzzers that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Malformed messages, and what they do.")
    parser.add_argument("runs", nargs="*", choices=[*RUNS, []], help="which; all of them unless named")
    parser.add_argument("--messages", type=int, default=100_000, help="for each (default 100,000)")
    parser.add_argument("--seed", type=int, default=None, help="a random one unless given")
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    for name in options.runs or RUNS:
        print(RUNS[name](seed, options.messages), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

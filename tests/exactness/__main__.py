"""``python -m tests.exactness [--full] [family …]``: families on the covering array, or on the full product of plans.

The default test run holds each model type to the array; the full product is some 1600 plans a family, minutes each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.exactness.families import FAMILIES, prepare
from tests.exactness.plans import Chains, check_plan, covering_plans, every_plan
from tests.exactness.policy import TINY, TokenTally


def main() -> int:
    """Print a line for each family and each failed plan; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.exactness", description="Hold tiny models to transformers.")
    parser.add_argument("--full", action="store_true", help="all plans instead of an array that covers all pairs")
    parser.add_argument("families", nargs="*", metavar="family", help=f"some of: {'; '.join(FAMILIES)}")
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    plans = list(every_plan()) if options.full else covering_plans()
    tally, failed = TokenTally(TINY), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, held in prepare(options.families or FAMILIES, Path(folder)).items():
            began, failed_before = time.monotonic(), failed
            chains = Chains(held)
            for plan in plans:
                try:
                    check_plan(chains[plan.partition], plan, held, tally)
                except AssertionError as error:
                    failed += 1
                    print(f"{name}, {plan}: {error}", flush=True)
            seconds = time.monotonic() - began
            print(f"{name}: {failed - failed_before} of {len(plans)} plans failed, {seconds:.0f} s", flush=True)
    tally.finish()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What a person sees of an answer: its text on stdout as it comes, and a closing line of figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from actorpp.errors import OutputError
from actorpp.serving.api import RequestMetrics


class Output:
    """Our results, to a file descriptor or a stream; always UTF-8, unbuffered."""

    def __init__(self, to: int | TextIO) -> None:
        self._to = to

    def write(self, text: str) -> None:
        """Write at once. Raises OutputError when it cannot be written."""
        try:
            if isinstance(self._to, int):
                data = text.encode("utf-8", "replace")
                while data:
                    data = data[os.write(self._to, data) :]
            else:
                self._to.write(text)
                self._to.flush()
        except OSError as error:
            raise OutputError(f"cannot write to stdout: {error.strerror}") from None


@contextmanager
def reserved_stdout() -> Iterator[Output]:
    """Keep stdout for results: what anything else writes to it meanwhile, child processes too, lands on stderr."""
    if sys.stdout is not sys.__stdout__ or sys.stdout is None:  # someone else holds it already, as a test does
        yield Output(sys.stdout)
        return
    sys.stdout.flush()
    stdout = sys.stdout.fileno()
    saved = os.dup(stdout)
    os.dup2(sys.stderr.fileno(), stdout)
    try:
        yield Output(saved)
    finally:
        os.dup2(saved, stdout)
        os.close(saved)


def figures(metrics: RequestMetrics) -> str:
    """The closing line: TTFT, prefill tokens/s, TPOT, busy share per stage."""
    parts = []
    if metrics.ttft_s is not None:
        parts.append(f"TTFT {_seconds(metrics.ttft_s)}")
    if metrics.prefill_tok_s is not None:
        parts.append(f"prefill {metrics.prefill_tok_s:.0f} tokens/s")
    if metrics.tpot_s is not None:
        parts.append(f"TPOT {_seconds(metrics.tpot_s)}")
    busy = ", ".join(f"{share:.0%}" for share in metrics.stage_busy)
    parts.append(f"busy per stage {busy}")
    return " | ".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"

"""Structured logs of this process on stderr, through structlog. Library code only calls ``structlog.get_logger``."""

from __future__ import annotations

import logging
import sys

import structlog


class _Stderr:
    """Looks ``sys.stderr`` up at each call, so that a progress bar which stands in for it keeps its lines whole."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logging(level: str) -> None:
    """Send log lines of ``level`` ("debug" to "error") and above to stderr, with colours on a terminal.

    For processes of our own: it sets the standard library's root logger up as well.
    """
    configure_structlog(level)
    number = max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING)
    logging.basicConfig(level=number, stream=sys.stderr, format="%(name)s: %(message)s")


def configure_structlog(level: str) -> None:
    """Our own log lines alone: in a program of someone else's, its other loggers are not touched."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(_Stderr()),  # type: ignore[arg-type]  # write and flush are all
        cache_logger_on_first_use=False,
    )

"""The prompt and the tally of the exactness tests."""

from tests.exactness.conftest import prompt_3000, tally

__all__ = ["prompt_3000", "tally"]

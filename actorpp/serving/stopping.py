"""Where an output's text ends: stop strings, found across the borders of tokens, pieces and characters.

Text is held back while it could become a stop string, so that nothing shown is ever taken back. What a tokenizer is,
and who listens, is not this module's business.
"""

from __future__ import annotations

from actorpp.serving.tokenizer import IncrementalDecoder, TextCodec


class StopSearch:
    """Searches text that comes in pieces for the stop string that ends first, of those that end there the longest.

    The result does not depend on how the text is cut into pieces.

    Args:
        strings: Stop strings, none of them empty.
        include: Whether a stop string that was found stays in the text.
    """

    def __init__(self, strings: tuple[str, ...], *, include: bool = False) -> None:
        self.found: str | None = None
        self._strings = strings
        self._include = include
        self._tail = ""  # end of the text so far, as far as it could begin a stop string

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take more text; returns what may be shown. After a stop string was found that is nothing.

        Args:
            may_stop: Whether a stop string that ends in this piece counts.
        """
        if self.found is not None:
            return ""
        known, text = len(self._tail), self._tail + text
        shown = known if self._include else 0
        if may_stop:
            hits = [
                (at + len(string), at, string)
                for string in self._strings
                if (at := text.find(string, max(0, known - len(string) + 1))) >= 0
            ]
            if hits:
                end, start, self.found = min(hits)
                self._tail = ""
                return text[shown : end if self._include else start]
        begins = min((_could_begin(string, text) for string in self._strings), default=len(text))
        self._tail = text[begins:]
        return text[shown:] if self._include else text[:begins]

    def finish(self) -> str:
        """No more text comes: what was held back."""
        rest, self._tail = "" if self._include else self._tail, ""
        return rest


def _could_begin(string: str, text: str) -> int:
    """Where in ``text`` an end of it starts that is also the beginning of ``string``; its length if there is none."""
    start = max(0, len(text) - len(string) + 1)
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return start
        start += 1
    return len(text)


class OutputText:
    """An output's text as its client sees it, id by id.

    Args:
        codec: Decodes; special tokens are left out.
        stop: Stop strings. One that ends within the first ``min_tokens`` ids does not count.
        stop_token_ids: Their text is left out.
        include: Whether the text keeps the stop string, or the stop token's text, that ends it.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: tuple[str, ...] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        min_tokens: int = 0,
        include: bool = False,
    ) -> None:
        self._decoder = IncrementalDecoder(codec)
        self._search = StopSearch(stop, include=include)
        self._left_out = frozenset() if include else stop_token_ids
        self._free = min_tokens

    @property
    def found(self) -> str | None:
        """The stop string that has ended the text."""
        return self._search.found

    def push(self, token: int) -> str:
        """Take the next id; returns the text that may now be shown. Raises RequestError when it cannot be decoded."""
        self._free -= 1
        text = "" if token in self._left_out else self._decoder.push((token,))
        return self._search.push(text, may_stop=self._free < 0)

    def reaches_stop(self, token: int) -> bool:
        """Take the next id; whether the text has now reached a stop string. Raises as ``push``."""
        self.push(token)
        return self.found is not None

    def finish(self) -> str:
        """The rest of the text: an incomplete character, and what was held back."""
        return self._search.push(self._decoder.finish(), may_stop=self._free < 0) + self._search.finish()

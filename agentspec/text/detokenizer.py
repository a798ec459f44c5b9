"""Generated ids to text, as they come: incremental UTF-8 and stop strings.

Owns one stream's undecoded bytes and held-back text. Knows nothing of stop ids, tags or events.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from agentspec.text.holdback import Holdback


class Pushed(NamedTuple):
    text: str
    """New text that is safe to show. Never contains a stop string or anything after it."""
    num_tokens: int
    """How many of the pushed ids belong to the stream: all, or up to and including the one that completed a stop
    string."""
    stop: str | None
    """The stop string that was completed."""


class Detokenizer:
    """Text of one stream of ids. Bytes that are no UTF-8 become U+FFFD; half a character waits for its other half.

    Of several stop strings the one that ends first in the text counts, as if characters came one by one, so the result
    doesn't depend on how the ids are grouped. After a stop the stream is over: no further push.
    """

    def __init__(self, token_bytes: Sequence[bytes], stop: tuple[str, ...] = (), *, min_tokens: int = 0) -> None:
        """`token_bytes[id]` are the raw bytes of an id. min_tokens: a stop string that is complete with so many ids is
        text like any other."""
        self._token_bytes = token_bytes
        self._stop = stop
        self._num_free = min_tokens if stop else 0
        self._num_passed = 0
        """Characters at the beginning of `_held` in which no stop string may end: they came with the first `min_tokens`
        ids."""
        self._holdback = Holdback(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> Pushed:
        if not self._num_free:
            return self._push(token_ids)
        free, others = token_ids[: self._num_free], token_ids[self._num_free :]
        self._num_free -= len(free)
        window = self._held + self._decoder.decode(b"".join([self._token_bytes[token_id] for token_id in free]))
        self._num_passed = len(window)
        shown = self._release(window)
        if not others:
            return Pushed(shown, len(free), None)
        rest = self._push(others)
        return Pushed(shown + rest.text, len(free) + rest.num_tokens, rest.stop)

    def _push(self, token_ids: Sequence[int]) -> Pushed:
        table = self._token_bytes
        before = self._decoder.getstate()
        text = self._decoder.decode(b"".join([table[token_id] for token_id in token_ids]))
        if not self._stop:
            return Pushed(text, len(token_ids), None)
        window = self._held + text
        if any(self._find(window, stop) >= 0 for stop in self._stop):
            self._decoder.setstate(before)
            return self._push_one_by_one(token_ids)
        return Pushed(self._release(window), len(token_ids), None)

    def flush(self) -> str:
        """The end of the stream: held-back text and U+FFFD for an unfinished character."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _push_one_by_one(self, token_ids: Sequence[int]) -> Pushed:
        """Find which id completes a stop string; the caller knows that one does."""
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            window = self._held + self._decoder.decode(self._token_bytes[token_id])
            found = [
                (start + len(stop), start, stop) for stop in self._stop if (start := self._find(window, stop)) >= 0
            ]
            if found:
                _, start, stop = min(found)
                self._held = ""
                self._decoder.reset()
                return Pushed("".join(shown) + window[:start], index + 1, stop)
            shown.append(self._release(window))
        raise AssertionError("a stop string was seen in the whole and in no part")

    def _find(self, window: str, stop: str) -> int:
        """Where a stop string begins that counts; -1: nowhere."""
        return window.find(stop, max(0, self._num_passed - len(stop) + 1))

    def _release(self, window: str) -> str:
        held = self._holdback.held(window)
        self._held = window[len(window) - held :]
        self._num_passed = max(0, self._num_passed - (len(window) - held))
        return window[: len(window) - held]

"""Incremental detokenization: token ids to text, with partial UTF-8 and stop strings.

Owns the undecoded bytes and held-back text of one stream. Knows nothing of stop ids, tags or events.
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
    """Number of pushed ids that belong to the stream: all, or those up to the id that completed a stop string."""
    stop: str | None
    """The completed stop string; None: no stop."""


class Detokenizer:
    """Decodes one stream of ids. Invalid UTF-8 becomes U+FFFD; an incomplete character is held back.

    If several stop strings match, the one that ends first in the text wins, as if characters came one by one. The
    result is therefore independent of how ids are grouped. After a stop the stream is over: no further push.
    """

    def __init__(self, token_bytes: Sequence[bytes], stop: tuple[str, ...] = (), *, min_tokens: int = 0) -> None:
        """`token_bytes[id]`: raw bytes of an id. `min_tokens`: a stop string that is complete within the first
        `min_tokens` ids is ordinary text."""
        self._token_bytes = token_bytes
        self._stop = stop
        self._num_free = min_tokens if stop else 0
        self._num_passed = 0
        """Number of leading characters of `_held` from the first `min_tokens` ids: no stop string may end in them."""
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
        """End the stream; return the held-back text, with U+FFFD for an incomplete character."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _push_one_by_one(self, token_ids: Sequence[int]) -> Pushed:
        """Find the id that completes a stop string. The caller guarantees that there is one."""
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
        raise AssertionError("a stop string was found in the whole text, but not id by id")

    def _find(self, window: str, stop: str) -> int:
        """Return the index of the first match that may stop the stream; -1 without one."""
        return window.find(stop, max(0, self._num_passed - len(stop) + 1))

    def _release(self, window: str) -> str:
        held = self._holdback.held(window)
        self._held = window[len(window) - held :]
        self._num_passed = max(0, self._num_passed - (len(window) - held))
        return window[: len(window) - held]

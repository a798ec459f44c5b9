"""Encode text to token ids and decode it, with the byte-level BPE of a checkpoint's tokenizer.json.

Owns the byte table (the raw bytes of every id). Knows nothing of templates, turns or stop strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from agentspec import files
from agentspec.errors import CheckpointError, RequestError
from agentspec.text.assets import named_tokens, read_object
from agentspec.text.token_limit import TokenBounds, can_cut_at_words, token_bounds

MAX_TOKENS = 2**22
"""Greatest vocabulary size; published ones have about 250,000 ids."""


@dataclass(frozen=True, slots=True)
class AddedTokenInfo:
    """An added token: matched as a whole, before BPE."""

    text: str
    is_cut: bool
    """Whether text can be split next to it: it absorbs no whitespace and is matched in the raw text."""


class Tokenizer:
    """A byte-level BPE tokenizer. Ids without a token (gaps in tokenizer.json) stand for no bytes."""

    def __init__(
        self,
        backend: Backend,
        *,
        source: str = "tokenizer",
        eos_token: str | None = None,
        reads_table: bool = True,
    ) -> None:
        """`source` names the tokenizer in errors. `reads_table`: False: leave `token_bytes` to its first use.

        Raises CheckpointError when the tokenizer isn't byte-level."""
        self._backend = backend
        self._source = source
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.added_tokens: tuple[AddedTokenInfo, ...] = tuple(
            AddedTokenInfo(
                token.content,
                not (token.lstrip or token.rstrip or token.single_word or token.normalized),
            )
            for token in added.values()
        )
        """All added tokens, in id order."""
        self.added_ids: tuple[int, ...] = tuple(added)
        """Their ids."""
        self.special_ids: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        """Text of a control token -> id. Control tokens are never shown; other added tokens (`<think>`, `<tool_call>`)
        are part of the visible text."""
        self.eos_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        """Id of tokenizer_config.json's eos_token; None when it names none."""
        if reads_table:
            _ = self.token_bytes

    @classmethod
    def from_directory(cls, path: Path | str, *, reads_table: bool = True) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint directory; None when it has no tokenizer.json. Raises CheckpointError when
        it can't be used; reads_table: as in the constructor."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not files.is_there(file):
            return None
        backend: Backend = files.parsed(file, Backend.from_buffer, "not a usable tokenizer")
        backend.no_truncation()
        backend.no_padding()
        names = named_tokens(read_object(directory / "tokenizer_config.json"))
        return cls(backend, source=str(file), eos_token=names.get("eos_token"), reads_table=reads_table)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Raw bytes by id; b"" for control tokens, so that they are never shown."""
        return _byte_table(self._backend, self._backend.get_added_tokens_decoder(), self._source)

    @cached_property
    def bounds(self) -> TokenBounds | None:
        """The most that one id can stand for; None: unknown."""
        return token_bounds(self._backend, self.spelled_bytes, cuts_only=self._cuts_only)

    @cached_property
    def cuts_at_words(self) -> bool:
        """Whether a text without added tokens can be split between an ASCII letter and a single space that a letter
        follows."""
        return can_cut_at_words(self._backend, cuts_only=self._cuts_only)

    @property
    def _cuts_only(self) -> bool:
        return all(token.is_cut for token in self.added_tokens)

    @property
    def vocab_size(self) -> int:
        """Highest id plus one: the length of `token_bytes`."""
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        """Encode a text. Control tokens that it spells become their ids; no tokens are added around it.

        Raises RequestError for invalid Unicode (a lone surrogate, which JSON can spell), and for text on which the
        library fails (millions of blanks in a row)."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, added_tokens: bool = True) -> list[list[int]]:
        """Encode each text like `encode`, on all cores and without holding the GIL.

        `added_tokens` False: text that spells an added token is ordinary text, and never encoded to its id."""
        backend = self._backend if added_tokens else self._without_added
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    "text", text[max(0, error.start - 20) : error.end], f"is not valid Unicode: {error.reason}"
                ) from error
        try:
            return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except BaseException as error:
            if not files.is_panic(error):
                raise
            longest = max(texts, key=len)
            raise RequestError(
                "text", longest[:40], f"can't be tokenised ({len(longest):,} characters): {error}"
            ) from error

    @cached_property
    def _without_added(self) -> Backend:
        """The same tokenizer without added tokens. The BPE model is shared, unless its vocabulary contains added
        tokens: then it is copied without them and without the merges that produce them."""
        if all(self._backend.model.token_to_id(token.text) is None for token in self.added_tokens):
            plain = Backend(self._backend.model)
            plain.normalizer, plain.pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
            return plain
        described = json.loads(self._backend.to_str())
        model = described["model"]
        added = {token for token, token_id in model["vocab"].items() if token_id in self.added_ids}
        model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token not in added}
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if added.isdisjoint((*pair, "".join(pair)))]
        return Backend.from_str(json.dumps(described | {"added_tokens": [], "post_processor": None}))

    @cached_property
    def spelled_bytes(self) -> list[bytes]:
        """`token_bytes` with the text of control tokens, as `encode` reads them."""
        table = list(self.token_bytes)
        for text, token_id in self.special_ids.items():
            table[token_id] = text.encode()
        return table

    def shown_bytes(self, *, skip_special_tokens: bool) -> list[bytes]:
        """Return the byte table that shows control tokens, or the one that skips them."""
        return self.token_bytes if skip_special_tokens else self.spelled_bytes

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids to text. Invalid UTF-8 becomes U+FFFD."""
        table = self.shown_bytes(skip_special_tokens=skip_special_tokens)
        return b"".join([table[token_id] for token_id in ids]).decode("utf-8", errors="replace")

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids to text including control tokens. Ids without a token have no text."""
        return self.decode([token_id for token_id in ids if token_id < self.vocab_size], skip_special_tokens=False)

    def name_of(self, token_id: int) -> str | None:
        """Return the token as tokenizer.json spells it (in the byte-level alphabet); None for an id without a token."""
        name: str | None = self._backend.id_to_token(token_id)
        return name

    def id_of(self, text: str) -> int | None:
        """Return the id of an added token; None when the text is not an added token."""
        if all(token.text != text for token in self.added_tokens):
            return None
        token_id: int | None = self._backend.token_to_id(text)
        return token_id


def _byte_table(backend: Backend, added: dict[int, AddedToken], source: str) -> list[bytes]:
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    num_ids = max(vocab.values(), default=-1) + 1
    if num_ids > MAX_TOKENS:
        raise CheckpointError(f"{source}: a token has the id {num_ids - 1}; ids must be below {MAX_TOKENS:,}")
    table = [b""] * num_ids
    for token_id, token in added.items():
        table[token_id] = b"" if token.special else token.content.encode()
    plain = {text: token_id for text, token_id in vocab.items() if token_id not in added}
    # All tokens are translated at once, which is several times as fast as one by one.
    letters = _LetterOfByte()
    try:
        data = "".join(plain).translate(letters).encode("latin-1")
    except UnicodeEncodeError:
        text, token_id = next(item for item in plain.items() if _NO_BYTE in item[0].translate(letters))
        raise CheckpointError(
            f"{source}: token {token_id} ({text!r}) isn't written in the byte-level BPE alphabet"
        ) from None
    start = 0
    for text, token_id in plain.items():
        end = start + len(text)
        table[token_id] = data[start:end]
        start = end
    return table


_NO_BYTE = "\ufffd"


class _LetterOfByte(dict[int, str]):
    """For str.translate: code point of the byte-level alphabet -> Latin-1 letter of its byte; any other -> _NO_BYTE."""

    def __init__(self) -> None:
        super().__init__({ord(letter): chr(byte) for letter, byte in _byte_alphabet().items()})

    def __missing__(self, code: int) -> str:
        return _NO_BYTE


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte. Byte-level BPE (GPT-2) writes printable bytes as themselves, and the others as U+0100,
    U+0101, ... in byte order."""
    printable: set[int] = {*_span("!", "~"), *_span("\u00a1", "\u00ac"), *_span("\u00ae", "\u00ff")}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _span(first: str, last: str) -> Iterable[int]:
    return range(ord(first), ord(last) + 1)

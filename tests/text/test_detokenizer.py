"""Incremental decoding equals decoding at once; stop strings are found for any grouping of the ids."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from agentspec.text.detokenizer import Detokenizer
from agentspec.text.holdback import Holdback
from agentspec.text.tokenizer import Tokenizer

BYTES = [bytes([byte]) for byte in range(256)]


def groups(rng: random.Random, ids: list[int]) -> list[list[int]]:
    result: list[list[int]] = []
    while ids:
        size = rng.randrange(0, 4)
        result.append(ids[:size])
        ids = ids[size:]
    return result


def run(
    token_bytes: list[bytes], pieces: list[list[int]], stop: tuple[str, ...] = (), min_tokens: int = 0
) -> tuple[str, int, str | None]:
    """Return (text, number of ids, stop) of a whole stream."""
    detokenizer = Detokenizer(token_bytes, stop, min_tokens=min_tokens)
    text, count = "", 0
    for piece in pieces:
        pushed = detokenizer.push(piece)
        text += pushed.text
        count += pushed.num_tokens
        if pushed.stop is not None:
            return text, count, pushed.stop
        assert pushed.num_tokens == len(piece)
    return text + detokenizer.flush(), count, None


def by_character(token_bytes: list[bytes], ids: list[int], stop: tuple[str, ...]) -> tuple[str, int, str | None]:
    """Reference implementation: grow the text character by character until it ends with a stop string."""
    for count in range(1, len(ids) + 1):
        raw = b"".join(token_bytes[token_id] for token_id in ids[:count])
        whole = raw.decode(errors="replace")
        if whole.endswith("\ufffd"):  # maybe an incomplete character: keep what further bytes don't change
            more = [(raw + tail).decode(errors="replace") for tail in (b"\x80", b"\xbf", b"a")]
            while not all(text.startswith(whole) for text in more):
                whole = whole[:-1]
        for end in range(1, len(whole) + 1):
            ended = [text for text in stop if whole[:end].endswith(text)]
            if ended:
                longest = max(ended, key=len)
                return whole[: end - len(longest)], count, longest
    return b"".join(token_bytes[token_id] for token_id in ids).decode(errors="replace"), len(ids), None


def test_incremental_decoding_equals_decoding_at_once() -> None:
    rng = random.Random(1)
    alphabet = [*"aé東🙂👩‍👧".encode(), 0x80, 0xC3, 0xE2, 0xF0, 0xFF]
    for trial in range(3000):
        ids = [rng.choice(alphabet) for _ in range(rng.randrange(24))]
        text, count, stop = run(BYTES, groups(rng, ids))
        assert (text, count, stop) == (bytes(ids).decode(errors="replace"), len(ids), None), (
            f"seed 1, trial {trial}: {ids}"
        )


def test_incremental_decoding_equals_decoding_at_once_with_bundled_tokenizer(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    for trial in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(50)]
        text, _, _ = run(tokenizer.token_bytes, groups(rng, ids))
        assert text == tokenizer.decode(ids), f"seed 2, trial {trial}"


def test_incomplete_character_is_held_back() -> None:
    detokenizer = Detokenizer(BYTES)
    emoji = "🙂".encode()
    assert [detokenizer.push([byte]).text for byte in emoji] == ["", "", "", "🙂"]
    assert detokenizer.push(list(emoji[:2])).text == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        ([b"ab", b"c\n\n", b"d"], ("\n\n",), ("abc", 2, "\n\n")),
        ([b"ab", b"c\n", b"\nd", b"e"], ("\n\n",), ("abc", 3, "\n\n")),
        ([b"ab", b"c\n", b"d"], ("\n\n",), ("abc\nd", 3, None)),
        ([b"xaab", b"."], ("aab", "ab"), ("x", 1, "aab")),
        ([b"aaab"], ("aab",), ("a", 1, "aab")),
        ([b"abcd"], ("bcd", "c"), ("ab", 1, "c")),
        ([b"ST", b"O", b"STOP", b"!"], ("STOP",), ("STO", 3, "STOP")),
        ([b"ST", b"OP"], ("STOPS",), ("STOP", 2, None)),
        ([b"\xe6\x9d", b"\xb1\xe4", b"\xba\xac"], ("東",), ("", 2, "東")),
        ([b"a\xe6", b"STOP"], ("STOP",), ("a\ufffd", 2, "STOP")),
    ],
)
def test_stop_strings(pieces: list[bytes], stop: tuple[str, ...], expected: tuple[str, int, str | None]) -> None:
    ids = list(range(len(pieces)))
    assert run(pieces, [ids], stop) == expected
    assert run(pieces, [[token_id] for token_id in ids], stop) == expected


def test_stop_strings_are_independent_of_id_grouping() -> None:
    rng = random.Random(3)
    vocabulary = [b"a", b"b", b"ab", b"ba", b"aa", b"bab", b"\xc3", b"\xa9", b"", b"c", b"abcab"]
    for trial in range(5000):
        stop = tuple(
            {"".join(rng.choice("abcé") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))}
        )
        ids = [rng.randrange(len(vocabulary)) for _ in range(rng.randrange(14))]
        expected = by_character(vocabulary, ids, stop)
        assert run(vocabulary, groups(rng, ids), stop) == expected, f"seed 3, trial {trial}: {ids} {stop}"


def test_only_a_possible_stop_is_held_back() -> None:
    detokenizer = Detokenizer(BYTES, ("<end>",))
    assert detokenizer.push(list(b"a <en")).text == "a "
    assert detokenizer.push(list(b"t")).text == "<ent"
    assert detokenizer.push(list(b"<<")).text == "<"
    assert detokenizer.push([]).text == ""
    assert detokenizer.flush() == "<"
    assert detokenizer.flush() == ""


def by_character_behind(ids: list[int], stop: tuple[str, ...], min_tokens: int) -> tuple[str, int, str | None]:
    """`by_character` of ASCII ids, ignoring stop strings that are complete within the first `min_tokens` ids."""
    text = bytes(ids).decode()
    for end in range(min_tokens + 1, len(ids) + 1):
        ended = [found for found in stop if text[:end].endswith(found)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], end, longest
    return text, len(ids), None


def test_stop_string_within_min_tokens_is_text() -> None:
    """Also while the prefix of a longer stop string is held back."""
    for pieces in ([b"xab", b"z"], [b"xabz"], [b"x", b"a", b"b", b"z"]):
        assert run(BYTES, [list(piece) for piece in pieces], ("ab", "xaby"), 3) == ("xabz", 4, None)
        assert run(BYTES, [list(piece) for piece in pieces], ("ab", "xaby"), 2) == ("x", 3, "ab")


def test_random_stop_strings_with_random_min_tokens() -> None:
    rng = random.Random(3)
    for trial in range(4000):
        ids = [ord(rng.choice("abc")) for _ in range(rng.randrange(20))]
        stop = tuple("".join(rng.choice("abc") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        least = rng.randrange(12)
        heard = run(BYTES, groups(rng, ids), stop, least)
        assert heard == by_character_behind(ids, stop, least), f"seed 3, trial {trial}: {bytes(ids)!r}, {stop}, {least}"


@pytest.mark.parametrize("seed", range(300))
def test_holdback_is_the_longest_marker_prefix(seed: int) -> None:
    rng = random.Random(f"holdback {seed}")
    markers = ["".join(rng.choices("ab", k=rng.randrange(1, 9))) for _ in range(rng.randrange(4))]
    text = "".join(rng.choices("ab", k=rng.randrange(12)))
    sizes = (size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size]))
    assert Holdback(markers).held(text) == max(sizes, default=0), f"seed {seed}: {markers}, {text!r}"


def test_long_marker_needs_little_memory() -> None:
    tracemalloc.start()
    holdback = Holdback(["ab" * 50_000 + "c"])
    assert holdback.held("ab" * 40_000) == 80_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000

"""Regular expressions for JSON numbers in a range.

They admit only numbers that no parser rounds out of the range: at most 15 significant digits near a bound, and no
exponent next to a bound. Knows nothing of schemas.
"""

from __future__ import annotations

from decimal import Decimal

MAX_INTEGER = 10**18 - 1
"""Integers fit in 64 bits, as most JSON parsers require."""
MAX_BOUNDED_NUMBER = 10**12 - 1
ANY_INTEGER = "(0|-?[1-9][0-9]{0,17})"
ANY_NUMBER = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?"
_SIGNIFICANT_DIGITS = 15
_FRACTION_DIGITS = 6


def integers_between(low: int, high: int) -> str:
    """Return an expression for the integers low..high without leading zeros. Requires low <= high."""
    parts = []
    if low < 0:
        parts.append("-" + _natural(max(1, -high), -low))
    if high >= 0:
        parts.append(_natural(max(0, low), high))
    return _any_of(parts)


def numbers_between(low: Decimal, high: Decimal, *, above_low: bool, below_high: bool) -> str | None:
    """Return an expression for decimal numbers in a range; None when it has no number that can be written.

    `above_low`, `below_high`: the bound itself is excluded. Both bounds must lie within MAX_BOUNDED_NUMBER."""
    parts: list[str | None] = []
    if low < 0:
        top = max(-high, Decimal(0))
        magnitudes = _decimals(top, -low, above_low=below_high if high < 0 else True, below_high=above_low)
        parts.append(None if magnitudes is None else "-" + magnitudes)
    if high >= 0:
        parts.append(_decimals(max(low, Decimal(0)), high, above_low=above_low and low >= 0, below_high=below_high))
    found = [part for part in parts if part is not None]
    return _any_of(found) if found else None


def _natural(low: int, high: int) -> str:
    parts = []
    for num_digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (num_digits - 1) if num_digits > 1 else 0)
        parts.append(_digits_between(str(first), str(min(high, 10**num_digits - 1))))
    return _any_of(parts)


def _digits_between(low: str, high: str) -> str:
    """Match digit strings of one length between `low` and `high`."""
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return f"[0-9]{{{len(low)}}}" if low else ""
    if low[0] == high[0]:
        return low[0] + _digits_between(low[1:], high[1:])
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:] != "0" * rest:
        parts.append(low[0] + _digits_between(low[1:], "9" * rest))
        first += 1
    if high[1:] != "9" * rest:
        parts.append(high[0] + _digits_between("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return _any_of(parts)


def _decimals(low: Decimal, high: Decimal, *, above_low: bool, below_high: bool) -> str | None:
    """Match the numbers between two non-negative bounds."""
    (low_whole, low_digits), (high_whole, high_digits) = _split(low), _split(high)
    room = _SIGNIFICANT_DIGITS - len(str(high_whole))
    if low_whole == high_whole:
        same = _with_fraction(_between(low_digits, high_digits, above_low, below_high, room))
        return None if same is None else _natural(low_whole, low_whole) + same
    parts = []
    lowest = _with_fraction(_at_least(low_digits, above_low, room))
    if lowest is not None:
        parts.append(f"{low_whole}{lowest}")
    if low_whole + 1 <= high_whole - 1:
        parts.append(_natural(low_whole + 1, high_whole - 1) + rf"(\.[0-9]{{1,{min(room, _FRACTION_DIGITS)}}})?")
    highest = _with_fraction(_at_most(high_digits, below_high, room))
    if highest is not None:
        parts.append(f"{high_whole}{highest}")
    return _any_of(parts) if parts else None


def _split(number: Decimal) -> tuple[int, str]:
    """Return the integer part, and the fraction digits without trailing zeros."""
    whole, _, digits = f"{number:f}".partition(".")
    return int(whole), digits.rstrip("0")


# The functions below return alternatives for the fraction digits; "" means that the fraction may be absent.


def _with_fraction(alternatives: list[str]) -> str | None:
    if not alternatives:
        return None
    written = [digits for digits in alternatives if digits]
    if not written:
        return ""
    return rf"(\.{_any_of(written)})" + ("?" if "" in alternatives else "")


def _more(room: int) -> str:
    return f"[0-9]{{0,{min(room, _FRACTION_DIGITS)}}}" if room > 0 else ""


def _at_least(bound: str, above: bool, room: int) -> list[str]:
    if not bound:
        if above:
            return [f"0{{0,{min(room, _FRACTION_DIGITS) - 1}}}[1-9]"] if room > 0 else []
        return ["", f"[0-9]{{1,{min(room, _FRACTION_DIGITS)}}}"] if room > 0 else [""]
    found = [f"[{int(bound[0]) + 1}-9]{_more(room - 1)}"] if bound[0] < "9" else []
    return found + _behind(bound[0], _at_least(bound[1:], above, room - 1))


def _at_most(bound: str, below: bool, room: int) -> list[str]:
    if not bound:
        return [] if below else ["", *(["0"] if room > 0 else [])]
    found = ["", *([f"[0-{int(bound[0]) - 1}]{_more(room - 1)}"] if bound[0] > "0" else [])]
    return found + _behind(bound[0], _at_most(bound[1:], below, room - 1))


def _between(low: str, high: str, above: bool, below: bool, room: int) -> list[str]:
    if not low and not high:
        return [] if above or below else ["", *(["0"] if room > 0 else [])]
    first, last = low[:1] or "0", high[:1] or "0"
    found = [""] if not low and not above else []
    if first == last:
        return found + _behind(first, _between(low[1:], high[1:], above, below, room - 1))
    if int(first) + 1 <= int(last) - 1:
        found.append(f"[{int(first) + 1}-{int(last) - 1}]{_more(room - 1)}")
    found += _behind(first, _at_least(low[1:], above, room - 1))
    return found + _behind(last, _at_most(high[1:], below, room - 1))


def _behind(digit: str, alternatives: list[str]) -> list[str]:
    written = [digits for digits in alternatives if digits]
    tail = "" if not written else _any_of(written) + ("?" if "" in alternatives else "")
    return [digit + tail] if alternatives else []


def _any_of(parts: list[str]) -> str:
    return "(" + "|".join(parts) + ")"

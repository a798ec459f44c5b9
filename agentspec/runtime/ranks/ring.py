"""The plan channel: a ring of messages in shared memory, with one writer and several readers, and the words in which
readers report.

Memory, in 64-bit words:

- For each reader one line of 64 bytes (`Report`), which only this reader writes.
- For each reader NUM_CHECKS check entries: the plan's number, then one sum for each slot (32 bits each).
- NUM_PARTS parts of the ring: a sequence number, the bytes that follow in the message from this part on, and
  PART_BYTES of payload. A message takes as many consecutive parts as it needs.

A part's sequence number is written last, so a reader that sees it finds the rest. The writer reuses a part only after
every reader has taken it. Stores of aligned words are whole; a lock between them orders them on every processor.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

Words: TypeAlias = "memoryview[int]"

NUM_PARTS = 64
PART_BYTES = 16 * 1024 - 16
NUM_CHECKS = 8

SPIN_SECONDS = 0.0002
_SLEEPS = (0.00002, 0.001)
"""Shortest and longest sleep of a side that waits. The longest is what a request may wait for on an idle engine."""

_WORD = 8
_LINE_WORDS = 8
_PART_WORDS = 2 + PART_BYTES // _WORD


class Report(NamedTuple):
    """A reader's line."""

    taken: int
    """Parts of the ring that it has taken, from the first."""
    done: int
    """Plans that it has finished, and whose check entry is written."""
    beat: int
    """Counts up as long as the reader's process is not stopped."""
    to_host: int
    """Host tier: orders carried out, all up to this number."""
    to_device: int


class Ring:
    """The shared memory. The process that makes it hands `fd` to its children, which `open` it."""

    def __init__(self, fd: int, *, num_readers: int, num_slots: int) -> None:
        """Map the memory of a file descriptor, which this object owns from now on. num_slots: of a step."""
        self.fd, self.num_readers, self.num_slots = fd, num_readers, num_slots
        self._check_words = 1 + -(-num_slots // 2)
        self._first_check = num_readers * _LINE_WORDS
        self._first_part = self._first_check + num_readers * NUM_CHECKS * self._check_words
        self._memory = mmap.mmap(fd, _WORD * (self._first_part + NUM_PARTS * _PART_WORDS))
        self._bytes = memoryview(self._memory)
        self._words: Words = self._bytes.cast("Q")
        self._order = threading.Lock()

    @classmethod
    def create(cls, *, num_readers: int, num_slots: int) -> Ring:
        """Memory without a name, so that nothing is left of it when the last process ends."""
        if sys.platform == "linux":
            fd = os.memfd_create("agentspec-plans")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        check_words = 1 + -(-num_slots // 2)
        os.ftruncate(fd, _WORD * (num_readers * (_LINE_WORDS + NUM_CHECKS * check_words) + NUM_PARTS * _PART_WORDS))
        return cls(fd, num_readers=num_readers, num_slots=num_slots)

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._memory.close()
        os.close(self.fd)

    def report(self, reader: int) -> Report:
        return Report(*self._words[reader * _LINE_WORDS : reader * _LINE_WORDS + len(Report._fields)])

    def put(self, reader: int, field: int, value: int) -> None:
        """Write one field of a reader's line, after everything that was written before."""
        self.order()
        self._words[reader * _LINE_WORDS + field] = value

    def check(self, reader: int, index: int) -> tuple[int, array[int]]:
        """(plan's number, sums by slot) of a check entry."""
        at = self._check_at(reader, index)
        sums = array("I")
        sums.frombytes(self._bytes[_WORD * (at + 1) : _WORD * (at + 1) + 4 * self.num_slots])
        return self._words[at], sums

    def put_check(self, reader: int, index: int, number: int, sums: array[int]) -> None:
        at = self._check_at(reader, index)
        self._words[at] = number
        self._bytes[_WORD * (at + 1) : _WORD * (at + 1) + 4 * self.num_slots] = sums.tobytes()

    def part(self, number: int) -> tuple[int, int]:
        """(sequence number, bytes that follow) of the part that message part `number` uses. Parts count from 1."""
        at = self._part_at(number)
        sequence = self._words[at]
        self.order()
        return sequence, self._words[at + 1]

    def payload(self, number: int, length: int) -> bytes:
        begin = _WORD * (self._part_at(number) + 2)
        return bytes(self._bytes[begin : begin + length])

    def put_part(self, number: int, remaining: int, payload: memoryview) -> None:
        at = self._part_at(number)
        begin = _WORD * (at + 2)
        self._bytes[begin : begin + len(payload)] = payload
        self._words[at + 1] = remaining
        self.order()
        self._words[at] = number

    def order(self) -> None:
        """A lock taken and released: neither the processor nor a compiler moves a store across it."""
        with self._order:
            pass

    def _check_at(self, reader: int, index: int) -> int:
        return self._first_check + (reader * NUM_CHECKS + index % NUM_CHECKS) * self._check_words

    def _part_at(self, number: int) -> int:
        return self._first_part + number % NUM_PARTS * _PART_WORDS


class Writer:
    """The leader's end."""

    def __init__(self, ring: Ring, check: Callable[[], None]) -> None:
        """check: called while the writer waits for readers; raises to end that."""
        self._ring = ring
        self._check = check
        self._written = 0
        self._taken = 0

    def send(self, message: bytes) -> None:
        """Write a message. Waits while the readers are NUM_PARTS behind."""
        remaining, rest = len(message), memoryview(message)
        while True:
            number = self._written + 1
            if number - self._taken > NUM_PARTS:
                self._await(number - NUM_PARTS)
            self._ring.put_part(number, remaining, rest[:PART_BYTES])
            self._written = number
            rest = rest[PART_BYTES:]
            remaining = len(rest)
            if not remaining:
                return

    def _await(self, number: int) -> None:
        for _ in pauses():
            self._taken = min(self._ring.report(reader).taken for reader in range(self._ring.num_readers))
            if self._taken >= number:
                return
            self._check()


class Reader:
    """A follower's end."""

    def __init__(self, ring: Ring, reader: int) -> None:
        self._ring = ring
        self._reader = reader
        self._taken = 0
        self._parts: list[bytes] = []

    def poll(self) -> bytes | None:
        """The next message; None if it isn't complete yet."""
        while True:
            number = self._taken + 1
            sequence, remaining = self._ring.part(number)
            if sequence != number:
                return None
            self._parts.append(self._ring.payload(number, min(remaining, PART_BYTES)))
            self._taken = number
            self._ring.put(self._reader, 0, number)
            if remaining <= PART_BYTES:
                message, self._parts = b"".join(self._parts), []
                return message


def pauses() -> Iterator[None]:
    """Yields without end: for SPIN_SECONDS at once, then with ever longer sleeps."""
    began = time.perf_counter()
    while time.perf_counter() - began < SPIN_SECONDS:
        yield
    seconds, longest = _SLEEPS
    while True:
        time.sleep(seconds)
        yield
        seconds = min(1.5 * seconds, longest)

"""The plan channel's shared memory: messages of any length arrive whole and in order at readers of any speed."""

from __future__ import annotations

import os
import random
import threading
from array import array

import pytest

from agentspec.errors import RankError
from agentspec.runtime.ranks.ring import NUM_PARTS, PART_BYTES, Reader, Report, Ring, Writer, pauses

LENGTHS = (1, 2, 100, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 5 * PART_BYTES + 7)


def never() -> None:
    return


def test_messages_arrive_in_order_at_every_reader() -> None:
    for seed in range(3):
        print(f"seed {seed}")
        rng = random.Random(seed)
        sent = [rng.randbytes(rng.choice(LENGTHS)) for _ in range(150)] + [rng.randbytes(2 * NUM_PARTS * PART_BYTES)]
        ring = Ring.create(num_readers=3, num_slots=4)
        heard: list[list[bytes]] = [[] for _ in range(3)]

        def read(place: int, ring: Ring = ring, heard: list[list[bytes]] = heard, total: int = len(sent)) -> None:
            reader = Reader(ring, place)
            for _ in pauses():
                message = reader.poll()
                if message is not None:
                    heard[place].append(message)
                if len(heard[place]) == total:
                    return

        threads = [threading.Thread(target=read, args=(place,)) for place in range(3)]
        for thread in threads:
            thread.start()
        writer = Writer(ring, never)
        for message in sent:
            writer.send(message)
        for thread in threads:
            thread.join()
        assert heard == [sent] * 3
        ring.close()


def test_a_writer_does_not_wait_for_ever_for_a_reader_that_takes_nothing() -> None:
    ring = Ring.create(num_readers=2, num_slots=1)
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RankError("gone")

    writer, quick = Writer(ring, check), Reader(ring, 0)
    for number in range(NUM_PARTS):
        writer.send(bytes([number]))
        assert quick.poll() == bytes([number])
    with pytest.raises(RankError):
        writer.send(b"one too many")
    assert quick.poll() is None
    ring.close()


def test_reports_and_checks_of_readers_are_apart() -> None:
    ring = Ring.create(num_readers=2, num_slots=3)
    for reader in range(2):
        for field in range(len(Report._fields)):
            ring.put(reader, field, 10 * reader + field)
        for index in range(5):
            ring.put_check(reader, index, index, array("I", [reader, index, 2**32 - 1]))
    for reader in range(2):
        assert ring.report(reader) == Report(*(10 * reader + field for field in range(len(Report._fields))))
        for index in range(5):
            assert ring.check(reader, index) == (index, array("I", [reader, index, 2**32 - 1]))
    ring.close()


def test_a_second_process_would_map_the_same_memory() -> None:
    ring = Ring.create(num_readers=1, num_slots=1)
    other = Ring(os.dup(ring.fd), num_readers=1, num_slots=1)
    Writer(ring, never).send(b"plan")
    assert Reader(other, 0).poll() == b"plan"
    assert ring.report(0).taken == 1
    other.close()
    ring.close()

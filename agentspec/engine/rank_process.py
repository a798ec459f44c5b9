"""A follower: `python -m agentspec.engine.rank_process SOCKET MEMORY`, started by engine/ranks.py with the numbers of
one end of a socket pair and of the plan channel's memory.

Holds one rank's part of the model and runs the leader's plans. Ends with the socket, or when its own work fails, which
it reports first.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec
import torch

from agentspec.engine.assembly import device_side, make_ready
from agentspec.engine.link import ids_of
from agentspec.engine.rank_link import Broken, Built, FromRank, Here, Planned, RankBuild, RankMemory, RankStart, ToRank
from agentspec.engine.ranks import meet
from agentspec.engine.settings import Settings, device_of, drafts_in_fp8, dtype_of, pages_in_fp8
from agentspec.kernels import RankGroup, group_of
from agentspec.models.protocol import StepModel
from agentspec.models.registry import load_model
from agentspec.models.shards import Rank
from agentspec.runtime.plan import StepOutcome
from agentspec.runtime.ranks.follower import Follower
from agentspec.runtime.ranks.ring import Report, Ring
from agentspec.types import no_progress
from agentspec.wire import FrameReader, framed

logger = logging.getLogger("agentspec")

_BEAT_SECONDS = 0.1
_RECEIVE_BYTES = 2**16
_FAILED = 1
_BEAT = Report._fields.index("beat")

ModelLoader = Callable[[RankStart], StepModel]
Watch = Callable[[int, StepOutcome], None]
OrderT = TypeVar("OrderT", RankStart, RankBuild, RankMemory)


def main(load: ModelLoader, watch: Watch = lambda number, outcome: None) -> None:
    """Follow the leader with the model that `load` makes. Never returns: the process ends here.

    watch: as in Follower, for tests."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the leader ends this process
    link = _Link(socket.socket(fileno=int(sys.argv[1])))
    try:
        _follow(link, int(sys.argv[2]), load, watch)
    except Exception as error:
        by_peer = isinstance(error, RuntimeError) and "gloo" in str(error)
        if not by_peer:
            logger.exception("a rank failed")
        link.send(Broken(f"{type(error).__name__}: {error}", by_peer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_FAILED)  # destructors might wait for the other ranks


class _Link:
    """The leader's socket. A separate thread reads it, so that the leader's death ends this process whatever it
    does."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._orders: SimpleQueue[ToRank] = SimpleQueue()
        threading.Thread(target=self._read, name="agentspec-link", daemon=True).start()

    def receive(self, kind: type[OrderT]) -> OrderT:
        order = self._orders.get()
        assert isinstance(order, kind)
        return order

    def send(self, message: FromRank) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the reading thread ends the process
            self._connection.sendall(framed(msgspec.msgpack.encode(message)))

    def _read(self) -> None:
        frames, decoder = FrameReader(), msgspec.msgpack.Decoder(ToRank)
        with suppress(ConnectionResetError):
            while data := self._connection.recv(_RECEIVE_BYTES):
                for body in frames.feed(data):
                    self._orders.put(decoder.decode(body))
        os._exit(0)


def _follow(link: _Link, memory_fd: int, load: ModelLoader, watch: Watch) -> None:
    start = link.receive(RankStart)
    ring = Ring(memory_fd, num_readers=start.count - 1, num_slots=start.num_slots)
    reader = start.index - 1
    threading.Thread(target=_beat, args=(ring, reader, os.getppid()), name="agentspec-beat", daemon=True).start()
    torch.set_num_threads(start.num_threads)
    device = device_of_rank(start)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    link.send(Here())
    model = load(start)
    build = link.receive(RankBuild)
    config = replace(start.config, max_running=build.max_running, copy_drafts=build.max_copies)
    settings = Settings.resolve(config, model.spec, device, given=build.given)
    if build.draft_ids is not None:
        model.limit_drafts(ids_of(build.draft_ids))
    link.send(Planned(settings.plan_memory(build.given)))
    memory = link.receive(RankMemory).memory
    executor, copies = device_side(model, settings, memory, build.most_riders)
    make_ready(executor, copies, settings, settings.window_policy()[1], no_progress, early=build.early)
    follower = Follower(ring, reader, executor, copies, check_every=start.check_every, watch=watch)
    link.send(Built())
    follower.run()


def _beat(ring: Ring, reader: int, parent: int) -> None:
    """Show that this process isn't stopped, and end it if its parent has ended without closing the socket, which a
    child of the parent may still hold."""
    beat = 0
    while os.getppid() == parent:
        beat += 1
        ring.put(reader, _BEAT, beat)
        time.sleep(_BEAT_SECONDS)
    os._exit(0)


def device_of_rank(start: RankStart) -> torch.device:
    return device_of(start.config, start.index, shares_device=start.shares_device)


def meet_leader(start: RankStart) -> RankGroup:
    """Meet the other ranks, as Ranks.join does; blocks until all are there."""
    process_group = meet(start.meeting, Rank(start.index, start.count))
    return group_of(process_group, device_of_rank(start), shares_device=start.shares_device)


def load_part(start: RankStart) -> StepModel:
    """This rank's part of the checkpoint. Meets the other ranks first."""
    rank, group = Rank(start.index, start.count), meet_leader(start)
    config, device = start.config, device_of_rank(start)
    dtype = dtype_of(config, device)
    assert start.model_dir is not None
    return load_model(
        Path(start.model_dir),
        device=device,
        dtype=dtype,
        random_weights=config.random_weights,
        seed=config.seed,
        fp8_drafts=drafts_in_fp8(config, device, dtype),
        fp8_pages=pages_in_fp8(config, dtype),
        rank=rank,
        group=group,
    )


if __name__ == "__main__":
    main(load_part)

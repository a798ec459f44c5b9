"""What the leader tells the followers at each step, as bytes: plans, copy orders, and to prepare.

The first byte says which. The rest is msgpack; token ids and mask rows are raw bytes, since all ranks are on one
machine."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np

from agentspec.cache.host_tier import CopyOrders
from agentspec.runtime.plan import StepPlan
from agentspec.types import tokens

_PLAN, _COPIES, _PREPARE = b"s", b"c", b"p"


class Prepare:
    """Do one piece of what the start has deferred (StepLoop.prepare)."""


Message = StepPlan | CopyOrders | Prepare


def encode(message: Message) -> bytes:
    if isinstance(message, StepPlan):
        return _PLAN + _encoder.encode(message)
    if isinstance(message, CopyOrders):
        return _COPIES + _encoder.encode(message)
    return _PREPARE


def decode(data: bytes) -> Message:
    kind, body = data[:1], memoryview(data)[1:]
    if kind == _PLAN:
        return _plans.decode(body)
    if kind == _COPIES:
        return _orders.decode(body)
    assert kind == _PREPARE
    return Prepare()


def _to_plain(value: Any) -> Any:
    if isinstance(value, array):
        return value.tobytes()
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.int32
    return len(value), value.tobytes()


def _from_plain(kind: Any, plain: Any) -> Any:
    if kind is array:
        ids = tokens()
        ids.frombytes(plain)
        return ids
    num_rows, data = plain
    return np.frombuffer(data, np.int32).reshape(num_rows, -1).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_plans = msgspec.msgpack.Decoder(StepPlan, dec_hook=_from_plain)
_orders = msgspec.msgpack.Decoder(CopyOrders)

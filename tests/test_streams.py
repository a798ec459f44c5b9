"""The table of request streams that every engine keeps."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from agentspec.engine.streams import Streams
from agentspec.errors import EngineClosedError, RequestError
from agentspec.types import FinishReason
from agentspec.wire import Event, FinishEvent, TokensEvent, Usage

WORD = TokensEvent(request_id="a", token_ids=[1], text="x")
END = FinishEvent(request_id="a", reason=FinishReason.STOP, usage=Usage())


@pytest.fixture
def streams() -> Streams[SimpleQueue[Event]]:
    return Streams(SimpleQueue)


def drained(inbox: SimpleQueue[Event]) -> list[Event]:
    return [inbox.get_nowait() for _ in range(inbox.qsize())]


def check_in_use(streams: Streams[SimpleQueue[Event]]) -> None:
    assert len(streams) == 1
    with pytest.raises(RequestError, match="in use"):
        streams.begin("a")


def test_a_reader_gets_its_events_and_then_the_id_is_free(streams: Streams[SimpleQueue[Event]]) -> None:
    inbox = streams.begin("a")
    streams.hand("a", WORD)
    check_in_use(streams)
    streams.hand("a", END)
    check_in_use(streams)
    assert drained(inbox) == [WORD, END]
    assert not streams.leave("a"), "there is nothing to abort"
    assert len(streams) == 0
    streams.begin("a")


def test_an_error_is_a_last_event(streams: Streams[SimpleQueue[Event]]) -> None:
    streams.begin("a")
    streams.hand("a", EngineClosedError("gone"))
    assert not streams.leave("a")


@pytest.mark.parametrize("how", ["its end", "freed"])
def test_the_id_of_an_abandoned_request_is_in_use_until_it_is_released(
    how: str, streams: Streams[SimpleQueue[Event]]
) -> None:
    inbox = streams.begin("a")
    assert streams.leave("a"), "it has to be aborted"
    streams.hand("a", WORD)
    check_in_use(streams)
    assert streams.is_running("a")
    if how == "freed":
        streams.free("a")
    else:
        streams.hand("a", END)
    assert len(streams) == 0
    assert drained(inbox) == []


def test_a_late_event_of_a_request_does_not_free_the_next_one_with_its_id(streams: Streams[SimpleQueue[Event]]) -> None:
    """The reader leaves while the last event is in transit; the id is reused before the engine reports that the request
    is unknown."""
    streams.begin("a")
    assert streams.leave("a")
    streams.hand("a", END)
    streams.begin("a")
    streams.free("a")
    assert streams.leave("a"), "the next one runs, and must be aborted"


def test_a_refused_request_leaves_no_state(streams: Streams[SimpleQueue[Event]]) -> None:
    streams.begin("a")
    streams.drop("a")
    assert len(streams) == 0


@pytest.mark.parametrize("death", [None, "it fell off"])
def test_the_end_of_an_engine_ends_all_streams(death: str | None, streams: Streams[SimpleQueue[Event]]) -> None:
    ended, running = streams.begin("a"), streams.begin("b")
    streams.begin("left")
    streams.leave("left")
    streams.hand("a", END)
    streams.end_all(death)
    assert drained(ended) == [END], "one terminal event"
    (last,) = drained(running)
    assert isinstance(last, FinishEvent)
    reason = FinishReason.ABORT if death is None else FinishReason.ERROR
    assert (last.request_id, last.reason, last.error, last.is_lost) == ("b", reason, death, death is not None)
    assert len(streams) == 2, "streams with a reader"

"""The process that renders and tokenises: `python -m agentspec.engine.text_process SECONDS FD`, started by
engine/remote_text.py.

FD is one end of a socket pair. Owns tokenizer, chat template, and the memory of turns; does one job after another. It
may be killed at any time: by its server, when a job takes too long; by a kernel timer a little later, whatever hangs;
and by itself, when the other end of the socket is closed.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import jsonschema  # noqa: F401  # now, and not when the first schema comes
import msgspec

from agentspec.engine.link import ErrorData, error_data, ids_of
from agentspec.engine.text_link import (
    BUFFER_BYTES,
    Build,
    Compile,
    Compiled,
    Done,
    Encode,
    Encoded,
    Read,
    Reader,
    Refused,
    Remember,
    ToServer,
    ToText,
    built,
    frame,
    prompt_of,
)
from agentspec.errors import AgentspecError, ConfigError, RequestError, beginning
from agentspec.heap import LARGE_BYTES, return_free_memory, return_large_blocks
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.prompt import PromptBuilder
from agentspec.text.token_limit import encode_within
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from agentspec.wire import FrameReader

logger = logging.getLogger("agentspec")

_RECEIVE_BYTES = 2**18
_SHOWN_CHARACTERS = 1000
_GRACE_SECONDS = 5
"""The server kills first; the timer is for the case that it can't."""


class _Worker:
    """The process's state, and the handling of messages."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None
        self._prompts: PromptBuilder | None = None

    def answer(self, message: ToText) -> ToServer | None:
        """Handle a message. None: no answer."""
        try:
            return self._answer(message)
        except AgentspecError as error:
            return Refused(_shortened(error_data(error)))
        except MemoryError:
            raise  # the process ends; a new one may succeed
        except Exception:
            logger.exception("a job of the text process failed")
            return Refused(error_data(AgentspecError("internal error")))

    def _answer(self, message: ToText) -> ToServer | None:
        match message:
            case Build(asked):
                assert self._prompts is not None
                return built(self._prompts.build(asked), self._prompts.num_spliced, self._prompts.num_mismatched)
            case Encode(texts, limit):
                assert self._tokenizer is not None
                found = encode_within(self._tokenizer, texts, each=limit)
                return Encoded([ids.tobytes() for ids in found])
            case Remember(begun, turn, ids, is_cut, skip_special_tokens):
                assert self._prompts is not None
                self._prompts.remember(
                    prompt_of(b"", begun), turn, ids_of(ids), is_cut=is_cut, skip_special_tokens=skip_special_tokens
                )
                return None
            case Read(directory):
                self._tokenizer = Tokenizer.from_directory(directory)
                if self._tokenizer is not None:
                    _ = self._tokenizer.bounds  # a tenth of a second, which no request should wait for
                return Done()
            case Compile():
                return self._compile(message)

    def _compile(self, asked: Compile) -> ToServer:
        """Load and try the template. A template that hangs does so here, before anything is served."""
        instead = None if asked.instead is None else Path(asked.instead)
        try:
            if asked.directory is None:
                assert instead is not None
                template: ChatTemplate | None = ChatTemplate.from_file(instead)
            else:
                template = ChatTemplate.from_directory(asked.directory, instead=instead)
        except OSError as error:
            raise ConfigError("chat_template", asked.instead, f"can't be read: {error.strerror or error}") from None
        if template is None:
            return Compiled(None)
        _try(template)
        tag_ids: dict[str, int] = {}
        if self._tokenizer is not None:
            self._prompts = PromptBuilder(
                self._tokenizer, template, TurnMemory(), trusts_client_text=asked.trusts_client_text
            )
            tag_ids = self._prompts.tag_ids
        # Loaded objects stay alive. Excluding them makes a full garbage collection so short that it delays no job.
        gc.collect()
        gc.freeze()
        return Compiled(template.source, template.reads, tag_ids)


def _shortened(error: ErrorData) -> ErrorData:
    """Cut the error's value: errors show only its beginning, so the rest needn't be sent."""
    shown = beginning(error.value, _SHOWN_CHARACTERS)
    return error if len(shown) <= _SHOWN_CHARACTERS else msgspec.structs.replace(error, value=shown[:_SHOWN_CHARACTERS])


def _try(template: ChatTemplate) -> None:
    """Render once, so that an endless template hangs now."""
    _ = template.system_places
    with suppress(RequestError):  # it may require other messages
        template.render([{"role": "user", "content": "a"}])


def main() -> int:
    return_large_blocks()
    # The server handles signals.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    seconds, connection = float(sys.argv[1]) + _GRACE_SECONDS, socket.socket(fileno=int(sys.argv[2]))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    threading.Thread(target=_end_with, args=(connection,), name="agentspec-text-end", daemon=True).start()
    worker, frames, reader = _Worker(), FrameReader(), Reader(ToText)
    while data := connection.recv(_RECEIVE_BYTES):
        for body in frames.feed(data):
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM kills the process
            answer = worker.answer(reader(body))
            signal.setitimer(signal.ITIMER_REAL, 0)
            if answer is not None:
                connection.sendall(frame(answer))
            if len(body) > LARGE_BYTES:
                return_free_memory()
    return 0


def _end_with(connection: socket.socket) -> None:
    """Kill the process when the other end of the socket is closed."""
    ends = select.poll()
    ends.register(connection, 0)
    ends.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

"""An engine whose model says what a script has: the real one, with its tokenizer and its cache, and outputs that are
forced."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from agentspec.engine.in_process import AsyncEngine
from agentspec.wire import Event, FinishEvent, ModelInfo, Submit
from scripts.clients.agents import ANSWER, MODEL, Calls


class ScriptedOutputs:
    """An engine whose model says what the script has: each call in its turn, then the answer.

    No form is asked of the real engine, which refuses one beside a forced output: the script's author sees to it that
    the words have it."""

    def __init__(self, engine: AsyncEngine, calls: Calls) -> None:
        self.finished: list[FinishEvent] = []
        assert engine.tokenizer is not None
        self._engine, self._tokenizer, self._calls = engine, engine.tokenizer, calls

    @property
    def info(self) -> ModelInfo:
        return msgspec.structs.replace(self._engine.info, model_id=MODEL)

    @property
    def alive(self) -> bool:
        return self._engine.alive

    def check_alive(self) -> None:
        self._engine.check_alive()

    async def stats(self) -> dict[str, Any]:
        return await self._engine.stats()

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        prompt = self._tokenizer.spell(list(submit.prompt_ids))
        ids = [*self._tokenizer.encode(self._next_text(prompt)), self.info.stop_token_ids[0]]
        async for event in self._engine.stream(msgspec.structs.replace(submit, grammar=None, forced_output=ids)):
            if isinstance(event, FinishEvent):
                self.finished.append(event)
            yield event

    def _next_text(self, prompt: str) -> str:
        thought = "The next step follows from the task.\n</think>\n\n" if prompt.endswith("<think>\n") else ""
        done = prompt.count("<|im_start|>user\n<tool_response>\n")
        lost = len(self.finished) > 3 * len(self._calls)  # an agent that goes on for ever must fail, not hang
        if lost or done >= len(self._calls) or f'"name": "{self._calls[done][0]}"' not in prompt:
            return thought + ANSWER
        return thought + as_text(*self._calls[done])


class OutputsInTurn(ScriptedOutputs):
    """The model says these one after the other, texts and calls alike: as many as the prompt has answers are said. The
    last one again and again."""

    def __init__(self, engine: AsyncEngine, outputs: tuple[str | tuple[str, dict[str, Any]], ...]) -> None:
        super().__init__(engine, ())
        self.prompts: list[str] = []
        self._outputs = outputs

    def _next_text(self, prompt: str) -> str:
        assert len(self.finished) < 3 * len(self._outputs), "the client goes on for ever"
        self.prompts.append(prompt)
        said = prompt.count("<|im_start|>assistant\n") - 1
        output = self._outputs[min(said, len(self._outputs) - 1)]
        thought = f"This is step {said + 1}.\n</think>\n\n" if prompt.endswith("<think>\n") else ""
        return thought + (output if isinstance(output, str) else as_text(*output))


def as_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as the bundled model writes it."""
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

"""The real engine, with its tokenizer and its cache, and outputs forced to a script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from agentspec.engine.in_process import AsyncEngine
from agentspec.wire import Event, FinishEvent, ModelInfo, Submit
from scripts.clients.agents import ANSWER, MODEL, Calls


class ScriptedOutputs:
    """An engine whose model emits a script: one call per turn, then the answer. Grammars are not passed to the real
    engine, which refuses one with a forced output; the script itself must conform."""

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
        lost = len(self.finished) > 3 * len(self._calls)  # an agent that never stops must fail, not hang
        if lost or done >= len(self._calls) or f'"name": "{self._calls[done][0]}"' not in prompt:
            return thought + ANSWER
        return thought + as_text(*self._calls[done])


class OutputsInTurn(ScriptedOutputs):
    """The model emits these outputs in turn, texts and calls alike; the number of answers in the prompt selects the
    next. The last one repeats."""

    def __init__(self, engine: AsyncEngine, outputs: tuple[str | tuple[str, dict[str, Any]], ...]) -> None:
        super().__init__(engine, ())
        self.prompts: list[str] = []
        self._outputs = outputs

    def _next_text(self, prompt: str) -> str:
        assert len(self.finished) < 3 * len(self._outputs), "the client never stops"
        self.prompts.append(prompt)
        said = prompt.count("<|im_start|>assistant\n") - 1
        output = self._outputs[min(said, len(self._outputs) - 1)]
        thought = f"This is step {said + 1}.\n</think>\n\n" if prompt.endswith("<think>\n") else ""
        return thought + (output if isinstance(output, str) else as_text(*output))


def as_text(name: str, arguments: dict[str, Any]) -> str:
    """A call in the bundled model's format."""
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

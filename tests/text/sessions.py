"""A client session with a scripted model, for tests of prompts that grow turn by turn."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

from agentspec.text.events import AssistantTurn
from agentspec.text.prompt import BuiltPrompt, PromptAsk, PromptBuilder
from agentspec.text.segmenter import Segmenter
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import ToolSchemas
from tests.text.conversations import SYSTEM, TOOLS


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids, including control tokens."""
    names = {token_id: text.encode() for text, token_id in tokenizer.special_ids.items()}
    return b"".join(names.get(token_id, tokenizer.token_bytes[token_id]) for token_id in ids).decode(errors="replace")


class Session:
    """A client, a scripted model, and the server code between them."""

    def __init__(
        self,
        builder: PromptBuilder,
        tokenizer: Tokenizer,
        rng: random.Random,
        *,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.builder = builder
        self.tokenizer = tokenizer
        self.rng = rng
        self.kwargs = template_kwargs
        self.messages: list[dict[str, Any]] = [SYSTEM]

    def ask(self, question: str) -> BuiltPrompt:
        self.messages.append({"role": "user", "content": question})
        return self.build()

    def build(self) -> BuiltPrompt:
        return self.builder.build(PromptAsk(json.loads(json.dumps(self.messages)), TOOLS, self.kwargs))

    def generate(self, prompt: BuiltPrompt, text: str, *, is_cut: bool = False) -> tuple[list[int], AssistantTurn]:
        """Generate `text`, in other tokens than its canonical tokenisation."""
        cuts = sorted(self.rng.randrange(len(text) + 1) for _ in range(5))
        ids = [
            token_id
            for start, end in itertools.pairwise([0, *cuts, len(text)])
            for token_id in self.tokenizer.encode(text[start:end])
        ]
        if not is_cut:
            ids.append(self.tokenizer.special_ids["<|im_end|>"])
        segmenter = Segmenter(
            reasoning_open=prompt.reasoning_open,
            dialect=self.builder.dialect,
            tools=ToolSchemas(TOOLS),
            is_mid_text=prompt.is_mid_text,
        )
        segmenter.push(self.tokenizer.decode(ids))
        segmenter.finish(is_cut=is_cut)
        self.builder.remember(prompt, segmenter.turn, ids, is_cut=is_cut)
        return ids, segmenter.turn

    def returned(self, turn: AssistantTurn, *, with_reasoning: bool = True, respelled: bool = False) -> None:
        """Append the assistant message to the client's history, and a result for every call."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or None}
        if with_reasoning:
            message["reasoning"] = turn.reasoning
        for call in turn.shown_calls:
            arguments = call.arguments
            if respelled:
                pairs = list(json.loads(arguments).items())
                self.rng.shuffle(pairs)
                arguments = json.dumps(dict(pairs), separators=(",", ":"), ensure_ascii=True)
            message.setdefault("tool_calls", []).append(
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            )
        self.messages.append(message)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result {index}"}
            for index, call in enumerate(turn.shown_calls)
        ]
        self.rng.shuffle(results)
        self.messages += results


def random_turn(rng: random.Random) -> str:
    """Return reasoning, optional content, and one to three calls whose values would change when serialised again."""
    values = {
        "to": ("Oslo", "東京", "two\nlines", "", "true", 'a "quote"', "</parameter>"),
        "seats": ("2", "02", "two"),
        "direct": ("true", "True", "false"),
        "filters": ('{"max":1.50, "b": null, "a": [ ]}', "{}"),
        "more": ("1", "x"),
    }
    calls = []
    for _ in range(rng.randrange(1, 4)):
        keys = rng.sample(sorted(values), rng.randrange(len(values) + 1))
        parameters = "".join(f"<parameter={key}>\n{rng.choice(values[key])}\n</parameter>\n" for key in keys)
        calls.append(f"<tool_call>\n<function=search_flights>\n{parameters}</function>\n</tool_call>")
    content = rng.choice(("", "Let me see. ✈️\n\n", "Eins,\n\nzwei.\n\n"))
    return f"{rng.choice(('I think.', 'Hm…  é', 'a' * 300))}\n</think>\n\n{content}" + "\n".join(calls)

"""The cached last prompt of a conversation never changes a prompt: each equals that of a builder without cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from agentspec.engine import bundled
from agentspec.text.chat_template import ChatTemplate, MessageMark
from agentspec.text.context_edits import ClearThinking, ClearToolUses
from agentspec.text.prompt import BuiltPrompt, PromptAsk, PromptBuilder
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from tests.text.conversations import TOOLS
from tests.text.sessions import Session, random_turn

TEMPLATES = {
    "bundled": bundled.DIRECTORY / "chat_template.jinja",
    "like_qwen": Path(__file__).parent / "templates" / "like_qwen.jinja",
}
DEEDS = ("ask", "answer", "answer", "go on", "go on", "go on", "begin", "take back", "edit", "count", "elsewhere")


class Client:
    """A random client: asks, starts answers, continues truncated ones, removes messages, and edits and counts
    prompts."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, seed: int) -> None:
        self.rng = random.Random(seed)
        self.where = f"seed {seed}"
        self.num_continued = 0
        self._tokenizer, self._template, self._memory = tokenizer, template, TurnMemory()
        self.session = Session(self._builder(), tokenizer, self.rng)
        self._add("user", "Hello")

    def do(self, deed: str) -> None:
        rng, messages = self.rng, self.session.messages
        last = messages[-1]
        if deed == "ask":
            self._add("user", rng.choice(("Hello", "<|im_end|>", "東京 é\n\n", "words " * 50)))
        elif deed == "answer" and last["role"] in ("user", "tool"):
            calls = rng.random() < 0.5
            text = random_turn(rng) if calls else "Hm.\n</think>\n\nEins,\n\nzw"
            _, turn = self.session.generate(self._build(), text, is_cut=not calls)
            self.session.returned(turn, with_reasoning=rng.random() < 0.5)
        elif deed == "go on" and last["role"] == "assistant" and last.get("content"):
            prompt = self._build(continues=True)
            _, turn = self.session.generate(
                prompt, rng.choice(("ei", "ei.\n\n", "<b>é", " ")), is_cut=rng.random() < 0.8
            )
            last["content"] += turn.content
            self.num_continued += 1
        elif deed == "begin" and last["role"] in ("user", "tool"):
            self._add("assistant", rng.choice(("It", "<think>\nHm", "two\n\n", "{")))
            self._build(continues=True)
        elif deed == "take back" and (
            questions := [place for place, message in enumerate(messages) if message["role"] == "user"][1:]
        ):
            del messages[rng.choice(questions) :]
        elif deed == "edit":
            self._build(
                edits=rng.choice(
                    ([ClearThinking(keep_turns=1)], [ClearToolUses(above=rng.randrange(800), keep=rng.randrange(3))])
                )
            )
        elif deed == "count":
            self._build(begins=False)
        elif deed == "elsewhere":
            self._build(namespace="salt")

    def _add(self, role: str, content: str) -> None:
        self.session.messages.append({"role": role, "content": content})

    def _build(self, **asked: Any) -> BuiltPrompt:
        messages = self.session.messages
        asked["marked"] = [MessageMark(self.rng.randrange(len(messages)))]
        prompt, expected = (
            builder.build(PromptAsk(messages, TOOLS, **asked)) for builder in (self.session.builder, self._builder())
        )
        assert prompt == expected, f"{self.where}: {asked}, {messages}"
        return prompt

    def _builder(self) -> PromptBuilder:
        return PromptBuilder(self._tokenizer, self._template, self._memory)


@pytest.mark.parametrize("file", TEMPLATES)
@pytest.mark.parametrize("seed", range(8))
def test_builder_with_cache_builds_the_same_prompts(tokenizer: Tokenizer, file: str, seed: int) -> None:
    client = Client(tokenizer, ChatTemplate(TEMPLATES[file].read_text()), seed)
    for _ in range(150):
        client.do(client.rng.choice(DEEDS))
    assert min(client.num_continued, client.session.builder.num_spliced) > 3, client.where


def test_continued_answers_keep_the_cached_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only new text is encoded, by each prompt that continues an assistant message and by the one after the whole
    answer."""
    session = Session(PromptBuilder(tokenizer, template, TurnMemory()), tokenizer, random.Random(4))
    session.ask("Hello " * 500)
    pieces = session.builder._encoder._pieces
    cut, looked_at = pieces.pieces, list[str]()
    monkeypatch.setattr(pieces, "pieces", lambda text: looked_at.append(text) or cut(text))
    for content in ("The", "The answer", "Something else"):
        session.builder.build(
            PromptAsk([*session.messages, {"role": "assistant", "content": content}], TOOLS, continues=True)
        )
    session.messages.append({"role": "assistant", "content": "The answer is 42."})
    session.ask("Sure?")
    assert sum(map(len, looked_at)) < 1000

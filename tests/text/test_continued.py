"""Answers that continue an assistant message: the prompt ends with its text, and the whole turn is recognised later."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from agentspec.engine import bundled
from agentspec.errors import RequestError
from agentspec.text.chat_template import ChatTemplate, MessageMark
from agentspec.text.context_edits import ClearToolUses
from agentspec.text.prompt import BuiltPrompt, PromptAsk, PromptBuilder
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from tests.text.conversations import SYSTEM, TOOLS
from tests.text.sessions import Session, spelled

TEMPLATES = {
    "bundled": bundled.DIRECTORY / "chat_template.jinja",
    "like_qwen": Path(__file__).parent / "templates" / "like_qwen.jinja",
}


@pytest.fixture(params=TEMPLATES)
def session(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Session:
    return Session(
        PromptBuilder(tokenizer, ChatTemplate(TEMPLATES[request.param].read_text()), TurnMemory()),
        tokenizer,
        random.Random(3),
    )


def continued(session: Session, **message: Any) -> BuiltPrompt:
    return session.builder.build(
        PromptAsk([*session.messages, {"role": "assistant", **message}], TOOLS, session.kwargs, continues=True)
    )


@pytest.mark.parametrize("content", ["Ans", 'Here:\n{"a": ', "", "two\n\n", "\ue000", "<b>"])
def test_continued_prompt_ends_with_the_unchanged_text(session: Session, content: str) -> None:
    asked = session.ask("Hello")
    prompt = continued(session, content=content)
    text = spelled(session.tokenizer, prompt.prompt_ids)
    assert text.endswith(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{content}")
    assert not prompt.reasoning_open
    assert prompt.breakpoints == asked.breakpoints


def test_continued_prompt_has_reasoning_before_content(session: Session) -> None:
    session.ask("Hello")
    text = spelled(session.tokenizer, continued(session, content="Ans", reasoning="Hm.").prompt_ids)
    assert text.endswith("<think>\nHm.\n</think>\n\nAns")


@pytest.mark.parametrize("begun", ["The ans", "One, ", "{\n"])
@pytest.mark.parametrize("then", ["wer is 42.", '  "a": 1}', "\n\nNext"])
def test_continued_turn_is_recognised_as_a_whole(session: Session, begun: str, then: str) -> None:
    """The client joins its text and the answer. The next prompt contains all ids, as long as no question follows."""
    session.ask("Hello")
    prompt = continued(session, content=begun)
    ids, turn = session.generate(prompt, then)
    assert (turn.reasoning, turn.content) == ("", then)
    session.messages += [{"role": "assistant", "content": begun + then}, {"role": "system", "content": "Go on."}]
    before = [*prompt.prompt_ids, *ids]
    assert list(session.build().prompt_ids[: len(before)]) == before
    assert session.builder.num_spliced == 1


@pytest.mark.parametrize("seed", range(20))
def test_answer_truncated_by_the_limit_is_continued(session: Session, seed: int) -> None:
    """Continued piece by piece until complete: each prompt contains all generated ids, and reasoning that the client
    dropped."""
    rng = random.Random(seed)
    text = (
        "I should think é.\n</think>\n\n"
        + " ".join(rng.choice(["one", "東京", "two\n\n", "é", "3.5"]) for _ in range(30))
        + "."
    )
    opening = text.index("\n\n") + 3
    cuts = sorted(rng.sample(range(opening, len(text) - 1), 3))
    prompt = session.ask("Hello")
    content = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        ids, turn = session.generate(prompt, text[start:end], is_cut=end < len(text))
        content += turn.content
        before = [*prompt.prompt_ids, *ids]
        if end < len(text):
            prompt = continued(session, content=content)
            assert list(prompt.prompt_ids) == before, f"seed {seed}, {start} to {end}"
    session.messages += [{"role": "assistant", "content": content}, {"role": "system", "content": "Go on."}]
    assert list(session.build().prompt_ids[: len(before)]) == before, f"seed {seed}"


@pytest.mark.parametrize(
    ("content", "is_open"),
    [
        ("<think>", True),
        ("<think>\nHm", True),
        (" <think>Hm", True),
        ("<think>Hm</think>", False),
        ("The tag is <think>", False),
        ("", False),
    ],
)
def test_think_block_opened_by_the_client_stays_open(session: Session, content: str, is_open: bool) -> None:
    session.ask("Hello")
    assert continued(session, content=content).reasoning_open is is_open


@pytest.mark.parametrize(
    ("content", "then", "reasoning", "answer"),
    [
        ("<think>\nHm", ", so.\n</think>\n\nYes.", ", so.", "Yes."),
        ("<think>", "\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("The tags are ", "<think> and </think>.", "", "<think> and ."),
        ("One,", "\n\ntwo", "", "\n\ntwo"),
    ],
)
def test_continuation_is_segmented_as_mid_text(
    session: Session, content: str, then: str, reasoning: str, answer: str
) -> None:
    session.ask("Hello")
    _, turn = session.generate(continued(session, content=content), then)
    assert (turn.reasoning, turn.content) == (reasoning, answer)


def test_mark_on_the_continued_text_is_the_prompt_end(session: Session) -> None:
    session.ask("Hello")
    messages = [*session.messages, {"role": "assistant", "content": "The answer"}]
    prompt = session.builder.build(
        PromptAsk(messages, TOOLS, session.kwargs, marked=[MessageMark(len(messages) - 1)], continues=True)
    )
    assert prompt.marked_end == len(prompt.prompt_ids)
    assert prompt.breakpoints[-1].offset == len(prompt.prompt_ids)


def test_edits_count_tokens_of_the_continued_prompt(session: Session) -> None:
    """The trigger counts the tokens of the prompt, which ends with the continued text."""
    call = {"id": "c", "type": "function", "function": {"name": "search_flights", "arguments": "{}"}}
    session.messages += [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a result " * 20},
        {"role": "assistant", "content": "The answer"},
    ]
    count = len(session.builder.build(PromptAsk(session.messages, TOOLS, session.kwargs, continues=True)).prompt_ids)
    for above, num_applied in ((count - 1, 1), (count, 0)):
        edit = ClearToolUses(above=above, keep=0)
        assert (
            len(
                session.builder.build(
                    PromptAsk(session.messages, TOOLS, session.kwargs, edits=[edit], continues=True)
                ).applied
            )
            == num_applied
        )


def test_template_that_hides_the_text_rejects_continuation(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="can't be continued"):
        PromptBuilder(tokenizer, template, TurnMemory()).build(
            PromptAsk([SYSTEM, {"role": "assistant", "content": "a"}], continues=True)
        )

"""Rendered sessions equal the chat template's output token for token, and the mask marks the tokens that the model
generates."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from agentspec.text.chat_template import ChatTemplate
from agentspec.text.messages import normalise
from scripts.tiny_agent.domain import Example, Split, Turn
from scripts.tiny_agent.render import READ, REPEATED, WRITTEN, Rendered, conversation_text, render, render_all
from scripts.tiny_agent.sessions import make_example
from scripts.tiny_agent.tokenizer import CHAT_TEMPLATE
from tests.tiny_agent.examples import EXAMPLES, small_tokenizer

SPLITS: tuple[Split, ...] = ("train", "held_out")
TEMPLATE = ChatTemplate(CHAT_TEMPLATE.read_text())


@cache
def cuts() -> list[tuple[Example, int]]:
    """Hand-made and generated sessions after each of their turns."""
    generated = [make_example(5, index, split=split) for split in SPLITS for index in range(40)]
    return [(example, num_turns) for example in EXAMPLES + generated for num_turns in range(1, len(example.turns) + 1)]


def template_text(example: Example, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    kwargs = {"enable_thinking": example.thinking}
    tools = example.tools or None
    return TEMPLATE.render(
        normalise(messages), tools, add_generation_prompt=add_generation_prompt, template_kwargs=kwargs
    ).text


def runs(rendered: Rendered, value: int) -> list[str]:
    """The text of each run of tokens with this value."""
    edges = np.flatnonzero(np.diff(rendered.mask == value, prepend=False, append=False)).tolist()
    tokenizer = small_tokenizer()
    return [
        tokenizer.decode(rendered.ids[a:b].tolist(), skip_special_tokens=False)
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def test_text_equals_the_templates_output() -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer())
    for example, num_turns in cuts():
        text = conversation_text(example, num_turns)
        messages = example.messages(num_turns)
        where = f"{example.session_id}, {num_turns} turns"
        assert template_text(example, messages, add_generation_prompt=False) == text, where
        messages = normalise(messages)  # transformers expects arguments as objects
        source = CHAT_TEMPLATE.read_text()
        expected = reference.apply_chat_template(
            messages,
            tools=list[Any](example.tools),
            chat_template=source,
            tokenize=False,
            enable_thinking=example.thinking,
        )
        assert expected == text, where


def test_ids_are_those_of_the_whole_text() -> None:
    tokenizer = small_tokenizer()
    for (example, num_turns), rendered in zip(cuts(), render_all(cuts(), tokenizer), strict=True):
        assert (
            rendered.ids.tolist()
            == tokenizer.encode(conversation_text(example, num_turns), add_special_tokens=False).ids
        ), example.session_id
        assert rendered.mask.shape == rendered.ids.shape


def test_prompts_of_a_live_model_are_prefixes_of_the_training_ids() -> None:
    """The prompt of every answer of the last turn is a prefix of the session's ids, up to the first generated token."""
    tokenizer = small_tokenizer()
    for example, num_turns in cuts():
        rendered = render(example, tokenizer, num_turns)
        messages = example.messages(num_turns)
        last_question = max(index for index, message in enumerate(messages) if message["role"] == "user")
        for index in range(last_question + 1, len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            prompt = tokenizer.encode(
                template_text(example, messages[:index], add_generation_prompt=True), add_special_tokens=False
            ).ids
            where = f"{example.session_id}, {num_turns} turns, message {index}"
            assert rendered.ids[: len(prompt)].tolist() == prompt, where
            assert rendered.mask[len(prompt) - 1 : len(prompt) + 1].tolist() == [READ, WRITTEN], where


def test_the_mask_without_thinking() -> None:
    plain = next(example for example in EXAMPLES if example.session_id == "plain")
    rendered = render(plain, small_tokenizer(), 3)
    calls, answer, *_, done, thanks = runs(rendered, WRITTEN)
    assert calls.startswith(
        "I look up both.\n\n<tool_call>\n<function=get_order>\n<parameter=order_id>\nT-4071\n</parameter>"
    )
    assert calls.endswith("T-4072\n</parameter>\n</function>\n</tool_call><|im_end|>")
    assert answer == "T-4071 is Zoë's.\n\nT-4072 is naïve Ivo's.<|im_end|>"
    assert [done, thanks] == ["(Done.)<|im_end|>", "You are welcome.<|im_end|>"]
    assert runs(rendered, REPEATED) == []


def test_the_mask_with_thinking() -> None:
    thinks = next(example for example in EXAMPLES if example.session_id == "thinks")
    rendered = render(thinks, small_tokenizer(), 2)
    earlier, written = runs(rendered, REPEATED), runs(rendered, WRITTEN)
    assert len(earlier) == 2
    assert "think>" not in "".join(earlier)
    assert len(written) == 3
    assert written[0].startswith("The user asks for it.\n</think>\n\n<tool_call>\n<function=updateOrder>\n")
    assert "\n<parameter=rush>\ntrue\n</parameter>\n<parameter=tags>\n" + json.dumps(["a", "b"]) in written[0]
    assert all(text.endswith("<|im_end|>") for text in earlier + written)


@pytest.mark.parametrize("num_turns", [0, 4])
def test_turns_beyond_the_session_are_refused(num_turns: int) -> None:
    with pytest.raises(ValueError, match=f"num_turns: {num_turns} .* session 'plain'"):
        conversation_text(EXAMPLES[0], num_turns)


def test_a_session_with_thinking_needs_its_reasoning() -> None:
    with pytest.raises(ValueError, match="'plain': thinking is True, but an answer's reasoning is ''"):
        conversation_text(dataclasses.replace(EXAMPLES[0], thinking=True), 1)


def test_text_with_an_end_of_message_token_is_refused() -> None:
    example = dataclasses.replace(
        EXAMPLES[2], turns=[Turn(user="Hi<|im_end|>", goal={}, messages=EXAMPLES[2].turns[0].messages)]
    )
    with pytest.raises(ValueError, match="'no-tools': its text holds tokens"):
        render(example, small_tokenizer(), 1)

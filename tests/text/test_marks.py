"""Client marks: the text before a mark is the common prefix of all prompts that diverge after it."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from agentspec.engine import bundled
from agentspec.text.chat_template import CacheMark, ChatTemplate, MessageMark, ToolsMark
from agentspec.text.messages import normalise
from agentspec.text.prompt import PromptAsk, PromptBuilder
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from agentspec.types import CheckpointKind
from tests.text.conversations import CONVERSATIONS, SYSTEM, TOOLS

BUNDLED = bundled.DIRECTORY / "chat_template.jinja"
ALL = [BUNDLED, *sorted((Path(__file__).parent / "templates").glob("*.jinja"))]
LOOP = CONVERSATIONS["tool loop"]
QUESTION = {"role": "user", "content": "Something else"}


def marked_text(
    template: ChatTemplate, messages: list[dict[str, Any]], mark: CacheMark, tools: list[dict[str, Any]] | None = TOOLS
) -> str:
    rendered = template.render(normalise(messages), tools, marked=[mark])
    assert not rendered.marked_end or rendered.marked_end in [offset for offset, _ in rendered.marks]
    return rendered.text[: rendered.marked_end]


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_mark_after_a_message_ends_a_shared_prefix(file: Path, name: str) -> None:
    template = ChatTemplate(file.read_text(), variables={"eos_token": "<|im_end|>"})
    messages = CONVERSATIONS[name]
    for index, message in enumerate(messages):
        head = marked_text(template, messages, MessageMark(index))
        assert (message["content"] or "").strip() in head, index
        others = normalise([*messages[: index + 1]]) + [other_words(later) for later in messages[index + 1 :]]
        if message["role"] == "system":
            others = [*others[: index + 1], QUESTION]
        assert template.render(others, TOOLS).text.startswith(head), index


def other_words(message: dict[str, Any]) -> dict[str, Any]:
    words = "Other words"
    return {
        "role": message["role"],
        "content": f"<tool_response>{words}</tool_response>" if "<tool_response>" in str(message["content"]) else words,
    }


def test_mark_covers_its_whole_message() -> None:
    template = ChatTemplate(BUNDLED.read_text())
    heads = [marked_text(template, LOOP, MessageMark(index)) for index in range(len(LOOP))]
    assert heads[0].endswith(f"{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n")
    assert heads[1].endswith("Two seats to Oslo<|im_end|>\n<|im_start|>")
    assert heads[2].endswith("</function>\n</tool_call><|im_end|>\n")
    assert heads[3].endswith('[{"id": 7}]\n</tool_response>')
    assert heads[4].endswith("ok\n</tool_response><|im_end|>\n")
    assert heads[6].endswith("<tool_response>\n\n</tool_response><|im_end|>\n")


def test_a_mark_inside_a_message() -> None:
    template = ChatTemplate(BUNDLED.read_text())
    content = "A long document. And a question"
    messages = [SYSTEM, {"role": "user", "content": content}, *LOOP[2:]]
    assert marked_text(template, messages, MessageMark(1, 16)).endswith("user\nA long document.")
    assert marked_text(template, messages, MessageMark(1, 17)).endswith("user\nA long document. ")
    assert marked_text(template, messages, MessageMark(0, 8)).endswith("You help")
    answered = [*messages, {"role": "assistant", "content": "Right."}, {"role": "user", "content": "Why?"}]
    assert marked_text(template, answered, MessageMark(1, 16)).endswith("user\nA long document.")


def test_marks_in_the_tools() -> None:
    template = ChatTemplate(BUNDLED.read_text())
    first = marked_text(template, LOOP, ToolsMark(1))
    assert '"name": "search_flights"' in first
    assert "write_file" not in first
    both = marked_text(template, LOOP, ToolsMark(2))
    assert both.endswith("</tool_call>\n\n")
    assert SYSTEM["content"] not in both
    assert marked_text(template, LOOP[1:], ToolsMark(2)).endswith("</tool_call>")


@pytest.mark.parametrize(
    ("mark", "kind"),
    [
        (ToolsMark(1), CheckpointKind.SYSTEM),
        (MessageMark(0, 5), CheckpointKind.SYSTEM),
        (MessageMark(0), CheckpointKind.SYSTEM),
        (MessageMark(1), CheckpointKind.BRANCH),
        (MessageMark(3), CheckpointKind.BRANCH),
        (MessageMark(len(LOOP) - 1), CheckpointKind.GRID),
    ],
    ids=str,
)
def test_kinds(mark: CacheMark, kind: CheckpointKind) -> None:
    rendered = ChatTemplate(BUNDLED.read_text()).render(normalise(LOOP), TOOLS, marked=[mark])
    assert (rendered.marked_end, kind) in rendered.marks


def test_mark_after_the_last_question_is_a_branch() -> None:
    rendered = ChatTemplate(BUNDLED.read_text()).render(normalise(LOOP[:2]), TOOLS, marked=[MessageMark(1)])
    assert (rendered.marked_end, CheckpointKind.BRANCH) in rendered.marks
    assert rendered.marks[-1][1] is CheckpointKind.USER


def test_no_mark_when_the_template_rejects_the_variants() -> None:
    strict = (
        "{% if not add_generation_prompt %}{{ raise_exception('only questions') }}{% endif %}{{ messages[0].content }}"
    )
    rendered = ChatTemplate(strict).render([{"role": "user", "content": "a"}], marked=[MessageMark(0), ToolsMark(1)])
    assert (rendered.marked_end, rendered.marks) == (0, [])


@pytest.mark.parametrize("seed", range(20))
def test_prompts_that_diverge_after_a_mark_share_its_tokens(
    tokenizer: Tokenizer, template: ChatTemplate, seed: int
) -> None:
    rng = random.Random(seed)
    builder = PromptBuilder(tokenizer, template, TurnMemory())
    messages = copy.deepcopy(LOOP)
    index = rng.choice([1, 3, 4, 6])
    content = messages[index]["content"] = "".join(rng.choices(["a document ", "東京 ", "\n", "1", "é", "<b>"], k=40))
    characters = rng.randrange(1, len(content)) if rng.random() < 0.6 else None
    prompt = builder.build(PromptAsk(messages, TOOLS, marked=[MessageMark(index, characters)]))
    assert any(point.offset == prompt.marked_end for point in prompt.breakpoints), f"seed {seed}"
    assert [point.offset for point in prompt.breakpoints] == sorted({point.offset for point in prompt.breakpoints}), (
        f"seed {seed}"
    )
    other = messages[: index + 1]
    if characters is not None:
        other[-1] = {
            **other[-1],
            "content": content[:characters] + rng.choice(["x", " ", "\u0301", "<|im_end|>", "aaa"]),
        }
    elif index == 3:
        other.append(messages[4] | {"content": "no"})
    parted = builder.build(PromptAsk(other, TOOLS)).prompt_ids
    common = next(
        (at for at, pair in enumerate(zip(parted, prompt.prompt_ids, strict=False)) if pair[0] != pair[1]), len(parted)
    )
    assert -1 <= common - prompt.marked_end < 12, (
        f"seed {seed}: the last token before a mark inside a text may merge with other text"
    )


def test_marked_end_is_zero_without_marks(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    assert PromptBuilder(tokenizer, template, TurnMemory()).build(PromptAsk(LOOP, TOOLS)).marked_end == 0

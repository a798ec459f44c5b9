"""System messages at any place: joined at the start, in place if the template supports it, else as marked text that is
not a question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentspec.engine import bundled
from agentspec.text.chat_template import ChatTemplate, MessageMark
from agentspec.text.messages import normalise
from agentspec.text.prompt import BuiltPrompt, PromptAsk, PromptBuilder
from agentspec.text.sentinels import OWN_TAG
from agentspec.text.system_messages import Arranged, SystemPlaces
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from tests.text.conversations import TOOLS, call
from tests.text.sessions import Session, random_turn, spelled

TEMPLATES = {"bundled": bundled.DIRECTORY / "chat_template.jinja"} | {
    file.stem: file for file in (Path(__file__).parent / "templates").glob("*.jinja")
}
MARKED = SystemPlaces(in_place=False, as_result=True)
CALLED = {"role": "assistant", "content": "", "tool_calls": [call("1", "write_file", {})]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "done"}
ANSWER = {"role": "assistant", "content": "Hello"}


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name].read_text(), variables={"eos_token": "<|im_end|>"})


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def marked(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("bundled", MARKED),
        ("like_qwen", MARKED),
        ("python_values", SystemPlaces(in_place=True, as_result=False)),
        ("tools_in_user", SystemPlaces(in_place=True, as_result=False)),
        ("json_calls", SystemPlaces(in_place=False, as_result=False)),
    ],
)
def test_probe_detects_system_message_support(name: str, places: SystemPlaces) -> None:
    assert template_of(name).system_places == places


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages | sort(attribute='role') %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content if m.role != 'system' or messages | length < 4 }}{% endfor %}",
    ],
    ids=["refuses all", "leaves later ones out", "sorts", "sometimes"],
)
def test_template_that_drops_later_system_messages_gets_marked_text(source: str) -> None:
    template = ChatTemplate(source)
    assert not template.system_places.in_place
    assert not template.system_places.as_result


def arranged(*messages: dict[str, Any], places: SystemPlaces = MARKED) -> list[dict[str, Any]]:
    return Arranged.of(normalise(messages), places).messages


def test_leading_system_messages_are_joined() -> None:
    first = [system("a", "developer"), system(" "), system("b"), user("q")]
    assert arranged(*first) == [system("a\n\nb"), user("q")]
    assert arranged(*first, places=SystemPlaces(in_place=True, as_result=False)) == [system("a\n\nb"), user("q")]
    assert arranged(system(""), user("q")) == [system(""), user("q")]
    assert arranged(system(""), system("b")) == [system("b")]


def test_later_system_messages_stay_in_place_if_supported() -> None:
    messages = [user("q"), system("a", "developer"), ANSWER, system("b"), user("r")]
    assert arranged(*messages, places=SystemPlaces(in_place=True, as_result=False)) == [
        user("q"),
        system("a"),
        ANSWER,
        system("b"),
        user("r"),
    ]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ([user("q"), system("a")], [user(f"q\n\n{marked('a')}")]),
        ([user("q"), system("a"), system("b"), user("r")], [user(f"q\n\n{marked('a')}\n\n{marked('b')}"), user("r")]),
        (
            [user("q"), ANSWER, system("a"), system("b"), user("r")],
            [user("q"), ANSWER, user(f"{marked('a')}\n\n{marked('b')}\n\nr")],
        ),
        ([user("q"), CALLED, RESULT, system("a")], [user("q"), CALLED, RESULT | {"content": f"done\n\n{marked('a')}"}]),
        (
            [user("q"), CALLED, RESULT | {"content": ""}, system("a")],
            [user("q"), CALLED, RESULT | {"content": marked("a")}],
        ),
        (
            [user("q"), ANSWER, system("a")],
            [user("q"), ANSWER, user(f"<tool_response>{OWN_TAG}\n{marked('a')}\n{OWN_TAG}</tool_response>")],
        ),
        (
            [user("q"), ANSWER, system("a"), ANSWER],
            [user("q"), ANSWER, user(f"<tool_response>{OWN_TAG}\n{marked('a')}\n{OWN_TAG}</tool_response>"), ANSWER],
        ),
        (
            [user("q"), ANSWER, user("<tool_response>\n1\n</tool_response>\n"), system("a")],
            [user("q"), ANSWER, user(f"<tool_response>\n1\n\n{marked('a')}\n</tool_response>")],
        ),
        ([system("x"), ANSWER, system("a")], [system("x"), ANSWER, user(marked("a"))]),
        ([user("q"), ANSWER, system(" \n"), user("r")], [user("q"), ANSWER, user("r")]),
    ],
    ids=[
        "behind words",
        "between words",
        "before words",
        "behind a result",
        "an empty result",
        "alone",
        "answered",
        "as user",
        "no question",
        "blank",
    ],
)
def test_later_system_messages_become_marked_text(sent: list[dict[str, Any]], shown: list[dict[str, Any]]) -> None:
    assert [{name: message[name] for name in ("role", "content")} for message in arranged(*sent)] == [
        {name: message[name] for name in ("role", "content")} for message in shown
    ]


@pytest.mark.parametrize("name", ["bundled", "like_qwen"])
def test_system_message_in_a_tool_loop_keeps_thinking(name: str) -> None:
    """At any place in the loop, the message is not a new question."""
    template = template_of(name)
    thinking = CALLED | {"reasoning_content": "I should write."}
    for behind in (
        [RESULT, system("a")],
        [RESULT, ANSWER, system("a")],
        [RESULT, ANSWER, system("a"), ANSWER],
        [RESULT, system("a"), CALLED],
    ):
        messages = Arranged.of(normalise([user("q"), thinking, *behind]), template.system_places).messages
        assert "I should write." in template.render(messages, TOOLS).text


def random_messages(rng: random.Random) -> list[dict[str, Any]]:
    messages = []
    for number in range(rng.randrange(1, 9)):
        role = rng.choice(["system", "system", "user", "assistant", "developer"])
        text = rng.choice([f"w{number}", f" w{number}\n", "", f"<tool_response>\nw{number}\n</tool_response>"])
        messages.append({"role": role, "content": text})
    return messages


@pytest.mark.parametrize("seed", range(200))
def test_marks_move_with_their_messages(seed: int) -> None:
    rng = random.Random(seed)
    messages = random_messages(rng)
    result = Arranged.of(normalise(messages), SystemPlaces(in_place=rng.random() < 0.3, as_result=rng.random() < 0.5))
    assert sum(message["role"] == "system" for message in result.messages[1:]) == 0 or result.places.in_place
    for index, message in enumerate(messages):
        at, characters = result.move_mark(index, None)
        before = result.messages[at]["content"][:characters]
        text = message["content"].strip().removesuffix("</tool_response>").strip()
        assert text in before, seed
        if message["role"] == "user" and not message["content"].startswith("<tool"):
            assert before.endswith(message["content"]), seed
        at, characters = result.move_mark(index, 1)
        assert result.messages[at]["content"][:characters].endswith(message["content"][:1]) or not text, seed


@pytest.mark.parametrize("name", ["bundled", "like_qwen", "python_values", "json_calls", "tools_in_user", "adds"])
def test_messages_without_content_are_rendered(name: str) -> None:
    """OpenAI's clients send calls with null or missing content."""
    adding = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' + m.content | length | string + '\n' }}{% endfor %}"
    )
    template = ChatTemplate(adding) if name == "adds" else template_of(name)
    empties: tuple[dict[str, Any], ...] = ({"content": None}, {"content": ""}, {"content": []}, {})
    for empty in empties:
        called = {key: value for key, value in CALLED.items() if key != "content"} | empty
        text = template.render(
            normalise([user("q"), called, {"role": "tool", "tool_call_id": "1", **empty}, user("r")]), TOOLS
        ).text
        assert "None" not in text
        assert "q" in text


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


def grow(session: Session, rng: random.Random, words: list[str], has_calls: bool) -> bool:
    """Add messages between two answers: system messages anywhere after the results, and maybe questions. Returns
    whether there was a question."""
    gap: list[dict[str, Any]] = []
    for _ in range(rng.randrange(0 if has_calls else 1, 4)):
        words.append(f"word ({len(words)}){rng.choice(['.', ' ', chr(10) + 'é'])}")
        gap.append({"role": rng.choice(["system", "developer", "user"]), "content": words[-1]})
    session.messages += gap
    return any(message["role"] == "user" for message in gap)


@pytest.mark.parametrize("name", ["bundled", "like_qwen", "python_values", "bundled, all thinking"])
def test_growing_history_extends_earlier_prompts(tokenizer: Tokenizer, name: str) -> None:
    """Random sessions with system messages anywhere: each prompt begins with the previous one and its answer, up to
    where a question drops thinking."""
    file, _, keeps = name.partition(", ")
    for seed in range(40):
        rng = random.Random(seed)
        builder = PromptBuilder(tokenizer, template_of(file), TurnMemory())
        session = Session(builder, tokenizer, rng, template_kwargs={"preserve_thinking": True} if keeps else None)
        session.messages += [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "Two seats to Oslo"},
        ]
        words: list[str] = ["Be kind."]
        grow(session, rng, words, True)
        prompt = session.build()
        for turn_number in range(5):
            at = f"seed {seed}, turn {turn_number}"
            text = rng.choice([random_turn(rng), f"I think.\n</think>\n\nAnswer {turn_number}."])
            ids, turn = session.generate(prompt, text)
            session.returned(turn, with_reasoning=rng.random() < 0.5)
            asked = grow(session, rng, words, bool(turn.calls))
            following = session.build()
            if asked and not keeps:
                kept = prompt.breakpoints[-1].offset
                assert following.prompt_ids[:kept] == prompt.prompt_ids[:kept], at
            else:
                before = [*prompt.prompt_ids, *ids]
                assert list(following.prompt_ids[: len(before)]) == before, at
            shown = spelled(tokenizer, following.prompt_ids)
            assert [shown.count(word.strip()) for word in words] == [1] * len(words), at
            prompt = retried(session, following, rng, words, at)
        assert keeps == "" or builder.num_mismatched == 0


def retried(session: Session, prompt: BuiltPrompt, rng: random.Random, words: list[str], at: str) -> BuiltPrompt:
    """Sometimes the answer is abandoned and another system message is added: the earlier text stays."""
    if rng.random() < 0.7:
        return prompt
    last = session.messages[-1]
    words.append(f"word ({len(words)}).")
    session.messages.append({"role": "system", "content": words[-1]})
    following = session.build()
    text, content = spelled(session.tokenizer, prompt.prompt_ids), last["content"].strip()
    reached = prompt.prompt_ids[
        : shared(prompt.prompt_ids, following.prompt_ids) + 1
    ]  # the last token may have merged with the next text
    assert len(spelled(session.tokenizer, reached)) >= text.rindex(content) + len(content), at
    return following


def test_mark_on_moved_text_reaches_the_engine(tokenizer: Tokenizer) -> None:
    builder = PromptBuilder(tokenizer, template_of("like_qwen"), TurnMemory())
    messages = [system("a"), system("b"), user("question"), system("note"), ANSWER, system("later"), user("more")]
    for index, end in enumerate(["\na", "\nb", "question", "note", "Hello", "later", "more"]):
        prompt = builder.build(PromptAsk(messages, marked=[MessageMark(index)]))
        before = spelled(tokenizer, prompt.prompt_ids[: prompt.marked_end])
        assert end in before, index
        assert not any(
            word in before for word in ["note", "later"][max(0, index - 2) // 2 :] if index in (0, 1, 2, 4)
        ), index

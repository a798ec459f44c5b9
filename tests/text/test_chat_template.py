"""Rendering equals transformers'; breakpoints are where conversations may diverge; errors name the input."""

from __future__ import annotations

import copy
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerFast

from agentspec.engine import bundled
from agentspec.errors import CheckpointError, RequestError
from agentspec.text import template_environment
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.messages import normalise
from agentspec.types import CheckpointKind
from tests.text.conversations import CONVERSATIONS, SYSTEM, TOOLS, call

TEMPLATES_IN = Path(__file__).parent / "templates"
TEMPLATES = sorted(TEMPLATES_IN.glob("*.jinja"))
BUNDLED = bundled.DIRECTORY / "chat_template.jinja"
ALL = [BUNDLED, *TEMPLATES]


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(bundled.DIRECTORY / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


VARIABLES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    "kwargs", [{}, {"enable_thinking": False}, {"preserve_thinking": True, "style": "plain"}], ids=str
)
def test_renders_like_transformers(
    reference: PreTrainedTokenizerFast, file: Path, name: str, tools: list[Any] | None, kwargs: dict[str, Any]
) -> None:
    messages = CONVERSATIONS[name]
    source = file.read_text()
    for add_generation_prompt in (True, False):
        expected = reference.apply_chat_template(
            copy.deepcopy(messages),
            tools=tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
        template = ChatTemplate(source, variables=VARIABLES)
        rendered = template.render(
            normalise(messages), tools, add_generation_prompt=add_generation_prompt, template_kwargs=kwargs
        )
        assert rendered.text == expected


def test_bundled_template_renders_the_published_format() -> None:
    """The whole format of Qwen3.5: separators, think blocks after the last question only, results in one user turn."""
    messages = normalise(
        [*CONVERSATIONS["tool loop"], {"role": "assistant", "content": "Fin."}, {"role": "user", "content": "Thanks"}]
    )
    template = ChatTemplate(BUNDLED.read_text())
    loop = template.render(messages[:-2], TOOLS).text
    assert loop.startswith("<|im_start|>system\n# Tools\n")
    assert loop.count("<tools>") == 1
    tools = [json.dumps(tool["function"], ensure_ascii=False) for tool in TOOLS]
    assert f"\n{tools[0]}\n{tools[1]}\n</tools>" in loop
    assert f"\n\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\nTwo seats to Oslo<|im_end|>\n" in loop
    turns = (
        "<|im_start|>assistant\n<think>\nI need flights.\n</think>\n\nLet me look.\n\n"
        "<tool_call>\n<function=search_flights>\n"
        "<parameter=to>\nOslo\n</parameter>\n<parameter=seats>\n2\n</parameter>\n<parameter=direct>\ntrue\n</parameter>\n"
        '<parameter=filters>\n{"max": 1.5, "via": null}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n"
        "<function=write_file>\n<parameter=path>\nnotes.txt\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n[{"id": 7}]\n</tool_response>\n<tool_response>\nok\n'
        "</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n<function=write_file>\n</function>\n</tool_call><|im_end|>\n"
    )
    assert turns in loop
    assert loop.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n")
    without_thinking = template.render(messages[:-2], TOOLS, template_kwargs={"enable_thinking": False}).text
    assert without_thinking == loop + "\n</think>\n\n"
    assert "<think>\nI need" not in template.render(messages, TOOLS).text
    assert "<think>\nI need" in template.render(messages, TOOLS, template_kwargs={"preserve_thinking": True}).text


RAW = '{"command": "grep "x" </parameter>\\n\\\\1'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (BUNDLED.read_text(), f"<tool_call>\n<function=bash>\n{RAW}\n</function>\n</tool_call>"),
        (
            (TEMPLATES_IN / "python_values.jinja").read_text(),
            f"<tool_call>\n<function=bash>\n{RAW}\n</function>\n</tool_call>",
        ),
        (
            (TEMPLATES_IN / "json_calls.jinja").read_text(),
            f'<tool_call>{{"name": "bash", "arguments": {RAW}}}</tool_call>',
        ),
        ((TEMPLATES_IN / "tools_in_user.jinja").read_text(), f'{{"name":"bash","arguments":{RAW}}}'),
        (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
            "<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson }}</arg_value>{% endfor %}{% endfor %}{% endfor %}",
            f'<arg_key>arguments</arg_key><arg_value>"{RAW}"</arg_value>',
        ),
    ],
    ids=["bundled", "python_values", "json_calls", "tools_in_user", "unknown form"],
)
def test_non_object_arguments_render_as_raw_text(source: str, expected: str) -> None:
    other: dict[str, Any] = {"a": 1, "b": "raw_name_" + "0" * 32}
    calls = [call("1", "bash", RAW), call("2", "bash", other), call("3", "bash", "ls")]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "raw_value_" + "f" * 32},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    rendered = ChatTemplate(source, variables=VARIABLES).render(normalise(messages), None).text
    parts = [expected, expected.replace(RAW, "ls")]
    assert [rendered.count(part) for part in parts] == [1, 1], rendered
    assert ("raw_name_" in rendered, "raw_value_" in rendered) == (
        other["b"] in rendered,
        messages[0]["content"] in rendered,
    )


def test_bundled_template_rejects_unsupported_messages() -> None:
    template = ChatTemplate(BUNDLED.read_text())
    cases = {
        "no user message": [SYSTEM],
        "must be the first": [{"role": "user", "content": "a"}, SYSTEM],
        "'robot'": [{"role": "robot", "content": "a"}, {"role": "user", "content": "a"}],
    }
    for words, messages in cases.items():
        with pytest.raises(RequestError, match=words) as caught:
            template.render(normalise(messages))
        assert caught.value.field == "messages"


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_marks_end_shared_prefixes_of_other_requests(file: Path, name: str) -> None:
    template = ChatTemplate(file.read_text(), variables=VARIABLES)
    messages = normalise(CONVERSATIONS[name])
    rendered = template.render(messages, TOOLS)
    marks = {kind: rendered.text[:offset] for offset, kind in rendered.marks}
    assert [offset for offset, _ in rendered.marks] == sorted(offset for offset, _ in rendered.marks)
    if CheckpointKind.SYSTEM in marks:
        leading = messages[:1] if messages[0]["role"] == "system" else []
        other = template.render([*leading, {"role": "user", "content": "Something else"}], TOOLS).text
        assert other.startswith(marks[CheckpointKind.SYSTEM])
    later = [*messages, {"role": "assistant", "content": "Right."}]
    if name != "results as user messages":  # there, another answer follows the marked question
        assert template.render(later, TOOLS).text.startswith(marks[CheckpointKind.USER])


def test_marks_of_the_bundled_template() -> None:
    template = ChatTemplate(BUNDLED.read_text())
    rendered = template.render(normalise(CONVERSATIONS["tool loop"]), TOOLS)
    (system, system_kind), (user, user_kind) = rendered.marks
    assert (system_kind, user_kind) == (CheckpointKind.SYSTEM, CheckpointKind.USER)
    assert rendered.text[:system].endswith(f"{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n")
    assert rendered.text[:user].endswith("Two seats to Oslo<|im_end|>\n<|im_start|>assistant\n")
    assert rendered.text[user:].startswith("<think>\n")


def test_system_mark_is_independent_of_earlier_renders() -> None:
    """System blocks are cached per system text, tools and template variables."""
    source = "{{ switch }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}"
    shared = ChatTemplate(source)
    for switch in ("x", "y", "x"):
        for tools in (TOOLS, None):
            for system in ("S", "Sa", "S"):
                messages: list[dict[str, Any]] = [
                    {"role": "system", "content": system},
                    {"role": "user", "content": "abc"},
                ]
                fresh = ChatTemplate(source).render(messages, tools, template_kwargs={"switch": switch})
                assert shared.render(messages, tools, template_kwargs={"switch": switch}) == fresh
                assert fresh.text[: fresh.marks[0][0]] == f"{switch}<system>{system}<user>"


def test_stale_system_block_is_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may show the date: a cached block that is no longer a prefix of the prompt is replaced."""
    template = ChatTemplate("{{ strftime_now('%F') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    for day in (1, 1, 2):
        clock = type("clock", (), {"now": staticmethod(lambda day=day: datetime(2026, 1, day))})
        monkeypatch.setattr(template_environment, "datetime", clock)
        rendered = template.render([{"role": "user", "content": "hello"}])
        assert rendered.text[: rendered.marks[0][0]] == f"2026-01-0{day}<user>"


def test_template_code_is_sandboxed() -> None:
    for attack in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns.__x = 1 %}",
        "{{ dict.__call__.__globals__ }}",
        "{{ raise_exception.__globals__.keys() }}",
    ):
        with pytest.raises(RequestError):
            ChatTemplate(attack).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "asked",
    [
        *(
            "row.role",
            "row.nothing",
            "row.items()|list",
            "row.keys",
            "row.clear()",
            "row.pop",
            "row['items']",
            "row.__class__",
            "row.format",
        ),
        *(
            "row.text.strip()",
            "row.text.upper()",
            "row.text.split(' ')",
            "row.text.format(1)",
            "row.text.__len__",
            "row.text.nothing",
        ),
        *(
            "loop.first",
            "loop.index0",
            "loop.nextitem.role",
            "loop.nothing",
            "loop._iterator",
            "loop.__call__",
            "loop.cycle(1, 2)",
        ),
        *("rows.append(1)", "rows.role", "like.role", "like.nothing", "like.secret", "none.role", "other.role"),
    ],
)
def test_sandbox_fast_paths_match_jinja(asked: str) -> None:
    """Same values, same undefined results, same refusals."""

    class Like(dict[str, Any]):
        secret = "an attribute"

    def said(environment: ImmutableSandboxedEnvironment) -> str:
        rows = [{"role": "user", "text": " a {} b ", "items": 3}, {"role": "tool"}]
        try:
            source = "{% for row in rows %}{{ " + asked + " }}|{{ (" + asked + ") is defined }};{% endfor %}"
            return re.sub(
                " at 0x[0-9a-f]+", "", environment.from_string(source).render(rows=rows, like=Like(role="x"), none=None)
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    assert said(template_environment.template_environment()) == said(ImmutableSandboxedEnvironment())


def test_any_template_error_becomes_a_request_error() -> None:
    with pytest.raises(RequestError, match="refuses them") as caught:
        ChatTemplate("{{ messages[0].content + 1 }}").render([{"role": "user", "content": "a" * 10_000}])
    assert len(str(caught.value)) < 500


def test_reserved_variables_cannot_be_overwritten() -> None:
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages"):
        ChatTemplate("x").render([{"role": "user", "content": "a"}], template_kwargs={"messages": []})


def test_template_sources_in_a_checkpoint_directory(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    user = [{"role": "user", "content": "a"}]
    config.write_text(
        json.dumps(
            {
                "eos_token": {"content": "</s>"},
                "bos_token": None,
                "chat_template": "plain{{ eos_token }}{{ bos_token }}",
            }
        )
    )
    plain = ChatTemplate.from_directory(tmp_path)
    assert plain is not None
    assert plain.render(user).text == "plain</s>"
    named = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "with <function="}]
    config.write_text(json.dumps({"chat_template": named}))
    both = ChatTemplate.from_directory(tmp_path)
    assert both is not None
    assert (both.render(user).text, both.render(user, TOOLS).text) == ("default", "with <function=")
    assert "<function=" in both.source
    (tmp_path / "chat_template.jinja").write_text("file")
    from_file = ChatTemplate.from_directory(tmp_path)
    assert from_file is not None
    assert from_file.render(user).text == "file"


@pytest.mark.parametrize("declared", [3, [{"name": "x", "template": "y"}], ["default"], "{% if %}"])
def test_unusable_template_error_names_its_source(tmp_path: Path, declared: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": declared}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.from_directory(tmp_path)


def test_call_without_function_wrapper_is_rendered() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call("a", "f", "{}")["function"]]},
    ]
    text = ChatTemplate(BUNDLED.read_text()).render(normalise(messages)).text
    assert "<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>" in text

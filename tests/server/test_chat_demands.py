"""Chat features beyond text: choices, log-probabilities, output forms, tool choice, and reasoning effort."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.errors import RequestError
from agentspec.server import turn as server_turn
from agentspec.server.pipeline import TextPipeline
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.constraints import OutputForm, ToolDemand
from agentspec.text.prompt import PromptBuilder
from agentspec.text.turn_memory import TurnMemory
from agentspec.types import FinishReason
from agentspec.wire import Grammar
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.fakes.generated import generated

Connect = Callable[..., httpx.AsyncClient]

CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
THINKING: dict[str, Any] = {**CHAT, "chat_template_kwargs": {"enable_thinking": True}}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
TAKE: dict[str, Any] = {"type": "function", "function": {"name": "take"}}
CALL = "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call>"


def post(
    connect: Connect, engine: ScriptedEngine, body: dict[str, Any], path: str = "/v1/chat/completions", **overrides: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine, **overrides) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def streamed(connect: Connect, engine: ScriptedEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    return chunks(post(connect, engine, {**body, "stream": True, "stream_options": {"include_usage": True}}))


def test_every_choice_is_a_separate_submit(connect: Connect) -> None:
    engine = ScriptedEngine(
        [*said("a"), ended()], [*said("b"), ended(FinishReason.LENGTH, stop_match=None)], [*said(CALL), ended()]
    )
    answer = post(connect, engine, {**CHAT, "n": 3, "seed": 5, "tools": [LOOK], "return_token_ids": True}).json()
    assert [submit.sampling.seed for submit in engine.submits] == [5, 6, 7]
    assert len({submit.request_id for submit in engine.submits}) == 3
    assert len({tuple(submit.prompt_ids) for submit in engine.submits}) == 1
    shown = [
        (choice["index"], choice["message"]["content"], choice["finish_reason"], len(choice["token_ids"]))
        for choice in answer["choices"]
    ]
    assert shown == [(0, "a", "stop", 1), (1, "b", "length", 1), (2, None, "tool_calls", len(said(CALL)[0].token_ids))]
    assert answer["prompt_token_ids"] == list(engine.submits[0].prompt_ids)
    assert (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
        answer["usage"]["total_tokens"],
    ) == (10, 18, 28)
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 12


def test_streamed_choices_are_interleaved(connect: Connect) -> None:
    engine = ScriptedEngine([*said("a", "b"), ended()], [*said("c"), ended(text="d")])
    parts = streamed(connect, engine, {**CHAT, "n": 2})
    texts, reasons, roles = ["", ""], [], []
    for choice in (choice for chunk in parts for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] if "role" in choice["delta"] else []
        reasons += [(choice["index"], choice["finish_reason"])] if choice["finish_reason"] else []
    assert (texts, roles, sorted(reasons)) == (["ab", "cd"], [0, 1], [(0, "stop"), (1, "stop")])
    assert [chunk["choices"][0]["index"] for chunk in parts[2:6]] == [0, 1, 0, 1], "choices don't wait for each other"
    assert [chunk["usage"] is None for chunk in parts] == [True] * (len(parts) - 1) + [False]
    assert (parts[-1]["usage"]["prompt_tokens"], parts[-1]["usage"]["completion_tokens"]) == (10, 12)
    plain = chunks(post(connect, ScriptedEngine([*said("a"), ended()]), {**CHAT, "n": 2, "stream": True}))
    assert ["metrics" in chunk for chunk in plain] == [False] * (len(plain) - 1) + [True]


@pytest.mark.parametrize("stream", [False, True])
def test_failing_choice_aborts_the_others(connect: Connect, stream: bool) -> None:
    engine = ScriptedEngine(
        [*said("a"), asyncio.Event()], [*said("b"), ended(FinishReason.ERROR, error="the step failed")]
    )
    response = post(connect, engine, {**CHAT, "n": 2, "stream": stream})
    assert "the step failed" in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 500)
    assert engine.aborted == [engine.submits[0].request_id]


def test_disconnect_aborts_every_choice(connect: Connect) -> None:
    async def run() -> None:
        engine = ScriptedEngine([*said("a"), asyncio.Event()])
        async with connect(engine) as client:
            async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "n": 3, "stream": True}) as response:
                await anext(response.aiter_raw())
            assert sorted(engine.aborted) == sorted(submit.request_id for submit in engine.submits)
            assert len(engine.aborted) == 3

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(25))
def test_only_content_tokens_have_log_probabilities(connect: Connect, pipeline: TextPipeline, seed: int) -> None:
    """For any step sizes: the scored tokens join to the content; tokens of reasoning, calls and the space between have
    no scores."""
    rng = random.Random(seed)
    reasoning, content = "한 so\n</think>\n\n", rng.choice(["Look é한!", "<thin", "a\n\nb", ""])
    call = "\n\n" + CALL if rng.random() < 0.5 else ""
    ids = pipeline.tokenizer.encode(reasoning + content + call)
    first = len(pipeline.tokenizer.encode(reasoning))
    wanted = pipeline.tokenizer.encode(content)
    body = {**THINKING, "tools": [LOOK], "logprobs": True, "top_logprobs": 1}
    script = [*generated(pipeline.tokenizer, ids, rng), ended()]
    engine = ScriptedEngine(script)
    choice = post(connect, engine, body).json()["choices"][0]
    assert engine.submits[0].logprobs == 1
    assert (choice["message"]["content"] or "") == content, (seed, content)
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == content, (seed, content)
    assert [entry["logprob"] for entry in entries] == [-0.5 - first - index for index in range(len(wanted))], (
        seed,
        content,
    )
    assert all(entry["top_logprobs"] == [{"token": "a", "logprob": -0.1, "bytes": [97]}] for entry in entries), seed
    assert choice["logprobs"]["refusal"] is None

    parts = streamed(connect, ScriptedEngine(script), body)
    pieces = [(choice["delta"].get("content"), choice["logprobs"]) for chunk in parts for choice in chunk["choices"]]
    assert [entry for _, logprobs in pieces if logprobs for entry in logprobs["content"]] == entries, (seed, content)
    assert all(bool(text) == (logprobs is not None) for text, logprobs in pieces), (seed, content)


def test_log_probabilities_are_absent_by_default(connect: Connect, pipeline: TextPipeline) -> None:
    script = [*generated(pipeline.tokenizer, pipeline.tokenizer.encode("ab"), random.Random(0)), ended()]
    engine = ScriptedEngine(script)
    assert post(connect, engine, CHAT).json()["choices"][0]["logprobs"] is None
    assert engine.submits[0].logprobs is None
    assert (
        post(connect, ScriptedEngine(script), {**CHAT, "logprobs": True}).json()["choices"][0]["logprobs"]["content"][
            0
        ]["top_logprobs"]
        != []
    )


@pytest.mark.parametrize(
    ("body", "text", "reasoning"),
    [
        (THINKING, "so\n</think>\n\nHello", "so\n</think>"),
        (THINKING, "\n</think>\n\nHello", "\n</think>"),
        (THINKING, "so on", "so on"),
        (THINKING, f"so {CALL}", "so "),
        (THINKING, f"so {CALL[:40]}", "so "),
        (CHAT, "Hello", ""),
        (CHAT, "<think>so</think>Hello", "<think>so</think>"),
    ],
    ids=["whole", "empty", "no end", "ended by a call", "ended by a cut call", "none", "opened by the model"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_tokens_are_counted(
    connect: Connect, pipeline: TextPipeline, body: dict[str, Any], text: str, reasoning: str, stream: bool
) -> None:
    cut = ended() if text.endswith((">", "o")) else ended(FinishReason.LENGTH, stop_match=None)
    engine = ScriptedEngine([*generated(pipeline.tokenizer, pipeline.tokenizer.encode(text), random.Random(1)), cut])
    asked = {**body, "tools": [LOOK]}
    usage = streamed(connect, engine, asked)[-1]["usage"] if stream else post(connect, engine, asked).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(pipeline.tokenizer.encode(reasoning))


def test_reasoning_tokens_are_summed_over_choices(connect: Connect, pipeline: TextPipeline) -> None:
    script = [*generated(pipeline.tokenizer, pipeline.tokenizer.encode("so</think>a"), random.Random(1)), ended()]
    assert (
        post(connect, ScriptedEngine(script), {**THINKING, "n": 3}).json()["usage"]["completion_tokens_details"][
            "reasoning_tokens"
        ]
        == 9
    )


class Demanded:
    """Replaces turn_grammar and records its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.grammar = Grammar(kind="regex", source="a")
        monkeypatch.setattr(server_turn, "turn_grammar", self)

    def __call__(
        self, tools: Any, demand: ToolDemand, output: OutputForm | None, *, dialect: Any, reasoning_open: bool
    ) -> Grammar:
        self.calls.append((tools, demand, output, dialect.name, reasoning_open))
        return self.grammar


def test_every_choice_has_the_grammar_of_the_demand(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    demanded = Demanded(monkeypatch)
    engine = ScriptedEngine()
    post(
        connect, engine, {**THINKING, "n": 2, "tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
    )
    assert [submit.grammar for submit in engine.submits] == [demanded.grammar] * 2
    post(connect, engine, {**CHAT, "response_format": {"type": "json_object"}})
    post(connect, engine, {**CHAT, "tools": [LOOK], "tool_choice": "none", "guided_regex": "a"})
    assert demanded.calls == [
        ([LOOK], ToolDemand(choice="required", parallel=False), None, "qwen3_coder", True),
        (
            None,
            ToolDemand(),
            OutputForm(kind="json_object", source=None, field="response_format"),
            "qwen3_coder",
            False,
        ),
        (
            None,
            ToolDemand(choice="none"),
            OutputForm(kind="regex", source="a", field="guided_regex"),
            "qwen3_coder",
            False,
        ),
    ]


def test_grammar_contains_only_the_allowed_tools(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt shows all tools, so that its prefix stays the same."""
    demanded = Demanded(monkeypatch)
    engine = ScriptedEngine()
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "take"}}]}
    post(
        connect,
        engine,
        {**CHAT, "tools": [LOOK, TAKE], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}},
    )
    post(connect, engine, {**CHAT, "tools": [LOOK, TAKE]})
    assert [tools for tools, *_ in demanded.calls] == [[TAKE]], "without a demand no grammar is made"
    assert engine.submits[0].prompt_ids == engine.submits[1].prompt_ids


def test_strict_flag_does_not_change_the_prompt(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    demanded = Demanded(monkeypatch)
    engine = ScriptedEngine()
    strict = {"type": "function", "function": {**LOOK["function"], "strict": True}}
    for tool in (LOOK, strict):
        post(connect, engine, {**CHAT, "tools": [tool]})
    assert engine.submits[0].prompt_ids == engine.submits[1].prompt_ids
    assert [tools for tools, *_ in demanded.calls] == [[strict]]


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"structured_outputs": {"choice": ["a"]}, **THINKING}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}, **THINKING}, "structured_outputs.grammar"),
        ({"tools": [LOOK], "tool_choice": "required"}, "tools"),
        ({"tools": [LOOK], "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_unsupported_grammar_error_names_the_clients_field(connect: Connect, extra: dict[str, Any], field: str) -> None:
    """Refused before the first token, in a running stream, and in one of several choices."""
    refused = ended(FinishReason.ERROR, error="can't go on", refused="grammar.source", stop_match=None)
    scripts: list[list[Any]] = [
        [RequestError("grammar.source", "...", "can't go on")],
        [refused],
        [*said("a"), refused],
    ]
    for script in scripts:
        for num_choices in (1, 2):
            for stream in (False, True):
                engine = (
                    ScriptedEngine([*said("a", "b", "c"), ended()], script)
                    if num_choices == 2
                    else ScriptedEngine(script)
                )
                response = post(connect, engine, {**CHAT, **extra, "n": num_choices, "stream": stream})
                is_half_way = stream and (num_choices == 2 or len(script) > 1)
                assert response.status_code == (200 if is_half_way else 400)
                last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
                shown = json.loads(last)["error"]
                assert (shown["param"], shown["type"], shown["code"]) == (
                    field,
                    "invalid_request_error",
                    "invalid_value",
                )
                assert shown["message"].startswith(f"{field}=")
                assert shown["message"].endswith(": can't go on")


@pytest.mark.parametrize("stream", [False, True])
def test_continued_answer_supports_demands(connect: Connect, pipeline: TextPipeline, stream: bool) -> None:
    """Constraints on choices, calls and forms apply to the new part."""
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Let me look. "}]
    body = {
        **CHAT,
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "tools": [LOOK],
        "stream": stream,
    }
    engine = ScriptedEngine([*said(CALL), ended()])
    response = post(
        connect, engine, {**body, "n": 2, "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": True}}
    )
    plain = ScriptedEngine([*said(CALL), ended()])
    post(connect, plain, {**CHAT, "tools": [LOOK], "tool_choice": "required"})
    assert [submit.grammar for submit in engine.submits] == [plain.submits[0].grammar] * 2, (
        "no reasoning may come before"
    )
    assert all(
        pipeline.tokenizer.spell(submit.prompt_ids).endswith("<|im_start|>assistant\nLet me look. ")
        for submit in engine.submits
    )
    if stream:
        starts = [
            call["function"]["name"]
            for chunk in chunks(response)
            for choice in chunk["choices"]
            for call in choice["delta"].get("tool_calls", ())
            if "id" in call
        ]
        assert starts == ["look", "look"]
    else:
        shown = [
            (choice["message"]["content"], choice["message"]["tool_calls"][0]["function"]["name"])
            for choice in response.json()["choices"]
        ]
        assert shown == [(None, "look")] * 2
    form = ScriptedEngine([*said("42"), ended()])
    post(connect, form, {**body, "tools": None, "guided_regex": "[0-9]+"})
    assert form.submits[0].grammar is not None
    assert form.submits[0].grammar.field == "guided_regex"


TEMPLATE = (
    "{% if tools %}<function={% endif %}{{ messages[0].content }}"
    "{% if reasoning_effort %} effort {{ reasoning_effort }}{% endif %}"
)
SWITCH = "{% if enable_thinking is defined and not enable_thinking %} quick{% endif %}"


@pytest.mark.parametrize(
    ("template", "extra", "shown"),
    [
        (TEMPLATE, {"reasoning_effort": "high"}, "hi effort high"),
        (TEMPLATE + SWITCH, {"reasoning_effort": "none"}, "hi quick"),
        (TEMPLATE, {"reasoning_effort": "none"}, "hi effort none"),
        (SWITCH, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}}, " quick"),
        (TEMPLATE, {"reasoning_effort": "any word"}, "hi effort any word"),
        (SWITCH, {"reasoning_effort": "low"}, ""),
        (SWITCH, {"reasoning_effort": "any word", "chat_template_kwargs": {"reasoning_effort": "low"}}, ""),
        ("{{ messages[0].content }}", {"reasoning_effort": "none"}, "hi"),
        (SWITCH, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, None),
        (TEMPLATE, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, None),
    ],
)
def test_reasoning_effort_reaches_templates_with_the_variable(
    connect: Connect, pipeline: TextPipeline, template: str, extra: dict[str, Any], shown: str | None
) -> None:
    tokenizer = pipeline.tokenizer
    engine = ScriptedEngine()
    prompts = PromptBuilder(tokenizer, ChatTemplate(template), TurnMemory())
    response = post(connect, engine, {**CHAT, **extra}, pipeline=TextPipeline(tokenizer, prompts))
    if shown is None:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning_effort")
    else:
        assert response.status_code == 200, response.text
        assert tokenizer.decode(engine.submits[0].prompt_ids) == shown


@pytest.mark.parametrize(
    ("path", "named", "body"),
    [
        (
            "/v1/messages",
            "output_config.effort",
            lambda effort: {"max_tokens": 9, "messages": CHAT["messages"], "output_config": {"effort": effort}},
        ),
        ("/v1/responses", "reasoning.effort", lambda effort: {"input": "hi", "reasoning": {"effort": effort}}),
    ],
)
@pytest.mark.parametrize(
    ("template", "effort", "shown"),
    [
        (TEMPLATE, "xhigh", "hi effort xhigh"),
        (TEMPLATE, "any word", "hi effort any word"),
        (TEMPLATE + SWITCH, "none", "hi quick"),
        ("{{ messages[0].content }}", "any word", "hi"),
        ("{{ messages[0].content }}{{ raise_exception('unknown') if reasoning_effort == 'huge' }}", "huge", None),
        (TEMPLATE, 3, None),
    ],
)
def test_reasoning_effort_in_messages_and_responses(
    connect: Connect,
    pipeline: TextPipeline,
    path: str,
    named: str,
    body: Callable[[Any], Any],
    template: str,
    effort: Any,
    shown: str | None,
) -> None:
    tokenizer = pipeline.tokenizer
    engine = ScriptedEngine()
    prompts = PromptBuilder(tokenizer, ChatTemplate(template), TurnMemory())
    asked = {"model": "scripted", **body(effort)}
    response = post(connect, engine, asked, path, pipeline=TextPipeline(tokenizer, prompts))
    if shown is None:
        assert response.status_code == 400
        assert (named if effort == 3 else "unknown") in response.text
    else:
        assert response.status_code == 200, response.text
        assert tokenizer.decode(engine.submits[0].prompt_ids) == shown

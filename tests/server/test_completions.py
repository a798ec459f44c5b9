"""/v1/completions over HTTP: prompts as text and as ids, echo, scores, several prompts, and checkpoints without a
tokenizer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.errors import RequestError
from agentspec.server.logprobs import CompletionLogprobs
from agentspec.server.pipeline import TextPipeline
from agentspec.types import Breakpoint, CheckpointKind, FinishReason, TokenScore
from agentspec.wire import FinishEvent, SpecStats, TokensEvent
from tests.fakes.engine_client import SPEC, ScriptedEngine, ended, said
from tests.fakes.generated import generated, scores_of

Connect = Callable[..., httpx.AsyncClient]


def post(connect: Connect, engine: ScriptedEngine, body: dict[str, Any], **overrides: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine, **overrides) as client:
            return await client.post("/v1/completions", json={"model": "scripted", **body})

    return asyncio.run(run())


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def lists_joined(parts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The streamed log-probabilities, concatenated."""
    scored = [logprobs for chunk in parts for choice in chunk["choices"] if (logprobs := choice["logprobs"])]
    return {name: [entry for logprobs in scored for entry in logprobs[name]] for name in scored[0]}


def test_text_prompt_is_encoded_and_answered(connect: Connect, pipeline: TextPipeline) -> None:
    engine = ScriptedEngine([*said("b", "c"), ended(text="d")])
    answer = post(connect, engine, {"prompt": "a", "max_tokens": 3}).json()
    assert list(engine.submits[0].prompt_ids) == pipeline.tokenizer.encode("a")
    assert engine.submits[0].prompt_logprobs is None
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "bcd", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["total_tokens"] == 16
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 9


def test_token_ids_and_echo(connect: Connect, pipeline: TextPipeline) -> None:
    ids = pipeline.tokenizer.encode("a<|im_end|>b")
    body = {"prompt": [*ids, 999], "echo": True, "return_token_ids": True}
    script = [*said("c"), ended()]
    choice = post(connect, ScriptedEngine(script), body).json()["choices"][0]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == (
        "abc",
        [*ids, 999],
        said("c")[0].token_ids,
    )
    first, second, last = chunks(post(connect, ScriptedEngine(script), {**body, "stream": True}))
    assert first["choices"][0]["text"] == "ab"
    assert first["choices"][0]["prompt_token_ids"] == [*ids, 999]
    assert (second["choices"][0]["text"], second["choices"][0]["token_ids"]) == ("c", said("c")[0].token_ids)
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids_of_the_output_only(connect: Connect, stream: bool) -> None:
    body = {"prompt": [97], "echo": True, "return_token_ids": "output", "stream": stream}
    answer = post(connect, ScriptedEngine([*said("c"), ended()]), body)
    choices = [chunk["choices"][0] for chunk in chunks(answer)] if stream else answer.json()["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == said("c")[0].token_ids
    assert all("prompt_token_ids" not in choice for choice in choices)


def test_skip_special_tokens_false_shows_control_tokens(connect: Connect, pipeline: TextPipeline) -> None:
    turn_end = pipeline.tokenizer.special_ids["<|im_end|>"]
    event = TokensEvent(
        request_id="", token_ids=[turn_end], text="<|im_end|>", scores=[TokenScore(turn_end, -1.0, [(turn_end, -1.0)])]
    )
    body = {"prompt": "a<|im_end|>b", "echo": True, "logprobs": 1}
    script = [event, ended(scores=scores_of(pipeline.tokenizer.encode("a<|im_end|>b")[1:]))]
    for skips, name, offset in ((False, "<|im_end|>", 12), (True, f"token_id:{turn_end}", 2)):
        engine = ScriptedEngine(script)
        choice = post(connect, engine, {**body, "skip_special_tokens": skips}).json()["choices"][0]
        assert engine.submits[0].skip_special_tokens is skips
        assert choice["text"].startswith("a<|im_end|>b" if not skips else "ab")
        assert (choice["logprobs"]["tokens"][1], choice["logprobs"]["tokens"][-1]) == (name, name)
        assert choice["logprobs"]["text_offset"][-1] == offset


def test_breakpoints_and_forced_output_reach_the_engine(connect: Connect) -> None:
    engine = ScriptedEngine()
    marks = [{"offset": 0, "kind": "system"}, {"offset": 3, "kind": "user"}]
    post(connect, engine, {"prompt": [1, 2, 3], "breakpoints": marks, "forced_output": [7, 8]})
    post(connect, engine, {"prompt": [1, 2, 3]})
    assert [submit.forced_output for submit in engine.submits] == [[7, 8], None]
    assert engine.submits[0].breakpoints == [Breakpoint(0, CheckpointKind.SYSTEM), Breakpoint(3, CheckpointKind.USER)]
    assert engine.submits[1].breakpoints == []


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"breakpoints": [{"offset": 1, "kind": "turn"}]}, "breakpoints[0].kind"),
        ({"breakpoints": [{"offset": 1}]}, "breakpoints[0]"),
        ({"prompt": ["a", "b"], "breakpoints": [{"offset": 1, "kind": "user"}]}, "breakpoints"),
        ({"forced_output": []}, "forced_output"),
        ({"forced_output": "text"}, "forced_output"),
    ],
)
def test_invalid_breakpoints_and_forced_output_are_refused_by_name(
    fields: dict[str, Any], name: str, connect: Connect
) -> None:
    answer = post(connect, ScriptedEngine(), {"prompt": "a", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_stream_without_extras_contains_only_text(connect: Connect) -> None:
    script = [*said("a", "", "b"), ended(text="c")]
    parts = chunks(
        post(
            connect, ScriptedEngine(script), {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
        )
    )
    assert [choice["text"] for chunk in parts for choice in chunk["choices"]] == ["a", "b", "c"]
    assert [chunk["usage"] is None for chunk in parts] == [True, True, True, False]
    assert "metrics" in parts[-1]
    assert all("token_ids" not in choice for chunk in parts for choice in chunk["choices"])


def test_continuous_usage_stats_count_the_tokens_of_each_choice(connect: Connect) -> None:
    engine = ScriptedEngine([*said("ab", ""), ended(text="c")], [*said("abcd"), ended()])
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = chunks(post(connect, engine, {"prompt": [[1, 2, 3], [4]], "stream": True, "stream_options": options}))
    for index, prompt_tokens, texts, counts in ((0, 3, ["ab", "", "c"], [2, 3, 3]), (1, 1, ["abcd", ""], [4, 4])):
        own = [chunk for chunk in parts[:-1] if chunk["choices"][0]["index"] == index]
        assert [chunk["choices"][0]["text"] for chunk in own] == texts
        assert [chunk["usage"] for chunk in own] == [
            {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
            for count in counts
        ]
    assert (parts[-1]["choices"], parts[-1]["usage"]["completion_tokens"]) == ([], 12)


def test_without_a_tokenizer_prompts_and_answers_are_ids(connect: Connect) -> None:
    script = [
        TokensEvent(request_id="", token_ids=[0], text=""),
        TokensEvent(request_id="", token_ids=[0], text=""),
        ended(),
    ]
    choice = post(connect, ScriptedEngine(script), {"prompt": [5, 6], "echo": True}, pipeline=None).json()["choices"][0]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("", [5, 6], [0, 0])
    plain = post(connect, ScriptedEngine(script), {"prompt": [5, 6]}, pipeline=None).json()["choices"][0]
    assert (plain["token_ids"], "prompt_token_ids" in plain) == ([0, 0], False)
    parts = chunks(post(connect, ScriptedEngine(script), {"prompt": [5, 6], "stream": True}, pipeline=None))
    assert [chunk["choices"][0].get("token_ids") for chunk in parts] == [[0], [0], []]
    asked = {"prompt": [5, 6], "stream": True, "return_token_ids": True}
    parts = chunks(post(connect, ScriptedEngine(script), asked, pipeline=None))
    assert [chunk["choices"][0].get("token_ids") for chunk in parts] == [[], [0], [0], []]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in parts] == [[5, 6], None, None, None]
    error = post(connect, ScriptedEngine(), {"prompt": "text"}, pipeline=None).json()["error"]
    assert (error["param"], "no tokenizer" in error["message"]) == ("prompt", True)


def test_each_prompt_becomes_a_choice(connect: Connect) -> None:
    engine = ScriptedEngine([*said("a"), ended()], [*said("b"), ended()])
    answer = post(connect, engine, {"prompt": [[1], [2]]}).json()
    assert sorted(list(submit.prompt_ids) for submit in engine.submits) == [[1], [2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["text"] for choice in answer["choices"]} == {"a", "b"}
    assert answer["usage"]["prompt_tokens"] == 20
    spec = answer["metrics"]["speculative_decoding"]
    assert spec["acceptance_histogram"] == [2 * count for count in SPEC.histogram]
    assert spec["by_source"]["mtp"]["drafted_by_position"] == [2 * count for count in SPEC.drafted_by_position]


def test_failing_prompt_aborts_the_others(connect: Connect) -> None:
    engine = ScriptedEngine([asyncio.Event(), ended()], [RequestError("prompt_ids", 7, "is wrong")])
    response = post(connect, engine, {"prompt": [[1], [2]]})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (400, "prompt", "prompt=7: is wrong")
    assert len(engine.aborted) == 1


def test_choices_of_several_prompts_are_ordered_by_prompt(connect: Connect) -> None:
    """Streamed or whole: indices are ordered by prompt and choice, each prompt counts once, and only seeds differ
    between choices."""
    body = {"prompt": [[1], [2]], "n": 2, "best_of": 2, "seed": 7, "stop": ["x"]}
    engine = ScriptedEngine(*([*said(word), ended()] for word in "abcd"))
    answer = post(connect, engine, body).json()
    assert [(list(submit.prompt_ids), submit.sampling.seed) for submit in engine.submits] == [
        ([1], 7),
        ([1], 8),
        ([2], 7),
        ([2], 8),
    ]
    assert len({submit.request_id for submit in engine.submits}) == 4
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate("abcd"))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (20, 24)

    engine = ScriptedEngine(*([*said(word, word), ended()] for word in "abcd"))
    parts = chunks(post(connect, engine, body | {"stream": True, "stream_options": {"include_usage": True}}))
    texts = dict.fromkeys(range(4), "")
    reasons = []
    for choice in (choice for chunk in parts for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        reasons += [choice["index"]] if choice["finish_reason"] else []
    assert list(texts.values()) == ["aa", "bb", "cc", "dd"]
    assert sorted(reasons) == [0, 1, 2, 3]
    assert (parts[-1]["choices"], parts[-1]["usage"]["prompt_tokens"], parts[-1]["usage"]["completion_tokens"]) == (
        [],
        20,
        24,
    )


def test_too_many_choices_are_refused(connect: Connect) -> None:
    error = post(connect, ScriptedEngine(), {"prompt": [[1]] * 17, "n": 128}).json()["error"]
    assert (error["param"], "17 prompts" in error["message"]) == ("prompt", True)


def test_output_form_errors_name_the_clients_field(connect: Connect) -> None:
    engine = ScriptedEngine([ended()], [RequestError("grammar", "a(", "is no grammar")])
    post(connect, engine, {"prompt": "a", "guided_regex": "a+"})
    assert engine.submits[0].grammar is not None
    assert (engine.submits[0].grammar.kind, engine.submits[0].grammar.after) == ("ebnf", None)
    error = post(connect, engine, {"prompt": "a", "structured_outputs": {"grammar": "a("}}).json()["error"]
    assert (error["param"], "is no grammar" in error["message"]) == ("structured_outputs.grammar", True)


def test_echo_with_logprobs_scores_the_prompt(connect: Connect, pipeline: TextPipeline) -> None:
    _, b, c = pipeline.tokenizer.encode("abc")
    scores = [
        TokenScore(token_id=b, logprob=-0.5, top=[(c, -0.1)]),
        TokenScore(token_id=c, logprob=-0.2, top=[(c, -0.2)]),
    ]
    engine = ScriptedEngine([ended(scores=scores)])
    choice = post(connect, engine, {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}).json()["choices"][0]
    (submit,) = engine.submits
    assert (submit.prompt_logprobs, submit.sampling.max_tokens) == (1, 0)
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.5, -0.2],
        "top_logprobs": [None, {"c": -0.1, "b": -0.5}, {"c": -0.2}],
        "text_offset": [0, 1, 2],
    }


def test_scoring_request_of_evaluation_harnesses(connect: Connect, pipeline: TextPipeline) -> None:
    """lm-evaluation-harness sends token ids with max_tokens 1, and drops the last token."""
    a, b, c = pipeline.tokenizer.encode("abc")
    of_b, of_c = (
        TokenScore(token_id=b, logprob=-1.0, top=[(b, -1.0)]),
        TokenScore(token_id=c, logprob=-2.0, top=[(a, -0.5)]),
    )
    one_token = TokensEvent(request_id="", token_ids=[c], text="c", scores=[of_c])
    body = {"prompt": [[a, b]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    engine = ScriptedEngine([one_token, ended(FinishReason.LENGTH, stop_match=None, scores=[of_b])])
    choice = post(connect, engine, body).json()["choices"][0]
    (submit,) = engine.submits
    assert (submit.prompt_logprobs, submit.logprobs) == (1, 1)
    expected = {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"b": -1.0}, {"a": -0.5, "c": -2.0}],
        "text_offset": [0, 1, 2],
    }
    assert (choice["text"], choice["logprobs"]) == ("abc", expected)
    parts = chunks(post(connect, engine, body | {"stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in parts] == ["ab", "c", ""]
    assert lists_joined(parts) == expected


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_scores_are_equal_streamed_and_whole(connect: Connect, pipeline: TextPipeline, seed: int, echo: bool) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(["a", "é", "한", "</think>", "\n"], k=rng.randint(1, 12)))
    ids = pipeline.tokenizer.encode(text)
    script = [*generated(pipeline.tokenizer, ids, rng), ended(scores=scores_of(pipeline.tokenizer.encode("hé")[1:]))]
    body = {"prompt": "hé", "logprobs": 2, "echo": echo, "max_tokens": 99}
    whole = post(connect, ScriptedEngine(script), body).json()["choices"][0]
    parts = chunks(post(connect, ScriptedEngine(script), body | {"stream": True}))
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in parts) == whole["text"] == ("hé" + text if echo else text)
    ), (seed, text)
    logprobs = whole["logprobs"]
    assert lists_joined(parts) == logprobs, (seed, text)
    assert len(logprobs["tokens"]) == len(ids) + (3 if echo else 0), (seed, text)
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert name.startswith("bytes:") or whole["text"].startswith(name, offset), (seed, text, name)


def test_prompt_of_one_token_has_no_scores(connect: Connect) -> None:
    body = {"prompt": [97], "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = post(connect, ScriptedEngine([ended(scores=[])]), body).json()["choices"][0]
    assert (choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]) == ([None], [None])


def test_impossible_token_has_a_finite_score() -> None:
    body = CompletionLogprobs([b"a"]).body(
        [0], [TokenScore(token_id=0, logprob=float("-inf"), top=[(0, float("-inf"))])]
    )
    assert (body["token_logprobs"], body["top_logprobs"]) == ([-9999.0], [{"a": -9999.0}])


def test_tokens_without_text_have_distinct_names() -> None:
    table = [b"a", "é".encode()[:1], "é".encode()[1:], b""]
    score = TokenScore(token_id=2, logprob=-1.0, top=[(1, -0.5), (3, -2.0), (9, -3.0)])
    logprobs = CompletionLogprobs(table)
    body = logprobs.body([0, 1, 2, 0], [None, score, score, score])
    assert body["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "a"]
    assert body["text_offset"] == [0, 1, 1, 2]
    assert body["top_logprobs"][1] == {"bytes:\\xc3": -0.5, "token_id:3": -2.0, "token_id:9": -3.0, "bytes:\\xa9": -1.0}
    assert logprobs.body([0], [score])["text_offset"] == [3]
    assert CompletionLogprobs(None).body([7], [None]) == {
        "tokens": ["token_id:7"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }


@pytest.mark.parametrize("prompt", ["", [], [[]]])
def test_empty_prompts_are_refused(connect: Connect, prompt: Any) -> None:
    response = post(connect, ScriptedEngine(), {"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


def test_metrics_without_steps_have_null_rates(connect: Connect) -> None:
    end = ended()
    assert isinstance(end, FinishEvent)
    end.usage.spec = SpecStats()
    spec = post(connect, ScriptedEngine([end]), {"prompt": "a"}).json()["metrics"]["speculative_decoding"]
    assert (spec["mean_acceptance_length"], spec["draft_acceptance_rate"], spec["acceptance_by_position"]) == (
        None,
        None,
        [],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half_way", [False, True])
def test_unsupported_grammar_error_names_the_clients_field(connect: Connect, stream: bool, half_way: bool) -> None:
    refused = ended(FinishReason.ERROR, error="can't go on", refused="grammar.source", stop_match=None)
    script = [*said("a"), refused] if half_way else [RequestError("grammar.source", "...", "can't go on")]
    response = post(
        connect, ScriptedEngine(script), {"prompt": "a", "guided_grammar": 'root ::= "a"', "stream": stream}
    )
    assert response.status_code == (200 if stream and half_way else 400)
    shown = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert (shown["param"], shown["type"]) == ("guided_grammar", "invalid_request_error")

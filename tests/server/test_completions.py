"""/v1/completions over HTTP: prompts as text and as ids, echo, scores, several prompts, and checkpoints without a tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.errors import RequestError
from agentspec.server.logprobs import logprobs_body
from agentspec.server.pipeline import TextPipeline
from agentspec.types import TokenScore
from agentspec.wire import SpecStats
from tests.fakes.engine_client import SPEC, ScriptedEngine, ended, said

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


def test_a_text_prompt_is_encoded_and_answered(connect: Connect, pipeline: TextPipeline) -> None:
    engine = ScriptedEngine([*said("b", "c"), ended(text="d")])
    answer = post(connect, engine, {"prompt": "a", "max_tokens": 3}).json()
    assert engine.submits[0].prompt_ids == pipeline.tokenizer.encode("a")
    assert engine.submits[0].prompt_logprobs is None
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "bcd", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["total_tokens"] == 16
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 9


def test_ids_and_echo(connect: Connect, pipeline: TextPipeline) -> None:
    ids = pipeline.tokenizer.encode("a<|im_end|>b")
    body = {"prompt": [*ids, 999], "echo": True, "return_token_ids": True}
    script = [*said("c"), ended()]
    choice = post(connect, ScriptedEngine(script), body).json()["choices"][0]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("abc", [*ids, 999], [99])
    first, second, last = chunks(post(connect, ScriptedEngine(script), {**body, "stream": True}))
    assert first["choices"][0]["text"] == "ab"
    assert first["choices"][0]["prompt_token_ids"] == [*ids, 999]
    assert (second["choices"][0]["text"], second["choices"][0]["token_ids"]) == ("c", [99])
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "stop")


def test_streaming_without_extras_sends_text_alone(connect: Connect) -> None:
    script = [*said("a", "", "b"), ended(text="c")]
    parts = chunks(post(connect, ScriptedEngine(script), {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}))
    assert [choice["text"] for chunk in parts for choice in chunk["choices"]] == ["a", "b", "c"]
    assert [chunk["usage"] is None for chunk in parts] == [True, True, True, False]
    assert "metrics" in parts[-1]
    assert all("token_ids" not in choice for chunk in parts for choice in chunk["choices"])


def test_without_a_tokenizer_ids_go_in_and_come_out(connect: Connect) -> None:
    script = [*said("", ""), ended()]
    choice = post(connect, ScriptedEngine(script), {"prompt": [5, 6], "echo": True}, pipeline=None).json()["choices"][0]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("", [5, 6], [0, 0])
    parts = chunks(post(connect, ScriptedEngine(script), {"prompt": [5, 6], "stream": True}, pipeline=None))
    assert [chunk["choices"][0].get("token_ids") for chunk in parts] == [[], [0], [0], None]
    error = post(connect, ScriptedEngine(), {"prompt": "text"}, pipeline=None).json()["error"]
    assert (error["param"], "no tokenizer" in error["message"]) == ("prompt", True)


def test_several_prompts_become_choices(connect: Connect) -> None:
    engine = ScriptedEngine([*said("a"), ended()], [*said("b"), ended()])
    answer = post(connect, engine, {"prompt": [[1], [2]]}).json()
    assert sorted(submit.prompt_ids for submit in engine.submits) == [[1], [2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["text"] for choice in answer["choices"]} == {"a", "b"}
    assert answer["usage"]["prompt_tokens"] == 20
    spec = answer["metrics"]["speculative_decoding"]
    assert spec["acceptance_histogram"] == [2 * count for count in SPEC.histogram]
    assert spec["by_source"]["mtp"]["drafted_by_position"] == [2 * count for count in SPEC.drafted_by_position]


def test_one_failing_prompt_ends_the_others(connect: Connect) -> None:
    engine = ScriptedEngine([asyncio.Event(), ended()], [RequestError("prompt_ids", 7, "is wrong")])
    response = post(connect, engine, {"prompt": [[1], [2]]})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (400, "prompt", "prompt=7: is wrong")
    assert len(engine.aborted) == 1


def test_scoring_a_prompt(connect: Connect, pipeline: TextPipeline) -> None:
    _, b, c = pipeline.tokenizer.encode("abc")
    scores = [TokenScore(token_id=b, logprob=-0.5, top=[(c, -0.1)]), TokenScore(token_id=c, logprob=-0.2, top=[(c, -0.2)])]
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


def test_scoring_what_was_generated_takes_a_second_pass(connect: Connect, pipeline: TextPipeline) -> None:
    """lm-evaluation-harness scores with max_tokens 1 and drops the last token."""
    (b,) = pipeline.tokenizer.encode("b")
    generated = type(said("b")[0])(request_id="", token_ids=[b], text="b")
    engine = ScriptedEngine([generated, ended()], [ended(scores=[TokenScore(token_id=b, logprob=-1.0, top=[])])])
    choice = post(connect, engine, {"prompt": "a", "echo": True, "logprobs": 0, "max_tokens": 1, "cache_salt": "s"}).json()["choices"][0]
    first, second = engine.submits
    assert (first.prompt_logprobs, second.prompt_logprobs, second.sampling.max_tokens, second.namespace) == (None, 0, 0, "s")
    assert second.prompt_ids == [*first.prompt_ids, b]
    assert (choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]) == ("ab", ["a", "b"], [None, -1.0])


def test_tokens_that_are_no_text_keep_distinct_names() -> None:
    table = [b"a", "é".encode()[:1], "é".encode()[1:], b""]
    score = TokenScore(token_id=2, logprob=-1.0, top=[(1, -0.5), (3, -2.0), (9, -3.0)])
    body = logprobs_body([0, 1, 2, 0], [score, score, score], table)
    assert body["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "a"]
    assert body["text_offset"] == [0, 1, 1, 2]
    assert body["top_logprobs"][1] == {"bytes:\\xc3": -0.5, "token_id:3": -2.0, "token_id:9": -3.0, "bytes:\\xa9": -1.0}
    assert logprobs_body([7], [], None) == {"tokens": ["token_id:7"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


@pytest.mark.parametrize("prompt", ["", [], [[]]])
def test_empty_prompts_are_refused(connect: Connect, prompt: Any) -> None:
    response = post(connect, ScriptedEngine(), {"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


def test_metrics_without_any_step_have_no_rates(connect: Connect) -> None:
    end = ended()
    end.usage.spec = SpecStats()
    spec = post(connect, ScriptedEngine([end]), {"prompt": "a"}).json()["metrics"]["speculative_decoding"]
    assert (spec["mean_acceptance_length"], spec["draft_acceptance_rate"], spec["acceptance_by_position"]) == (None, None, [])

"""However a client changes a turn before sending it back, the prompt starts with the generated ids, and they are
cached.

Clients drop reasoning, omit fields or set them to null, reorder keys, reserialise arguments, and send results in
another order. Random tool loops on a real engine: every turn's cached tokens reach the last block of the previous
turn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.types import BLOCK_TOKENS
from tests.fakes.told import Told, cached, converse

Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "seats": {"type": "integer"},
                    "window": {"type": "boolean"},
                    "guests": {"type": "array", "items": {"type": "string"}},
                    "extra": {"type": "object"},
                    "price": {"type": "number"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "list_rooms", "parameters": {"type": "object", "properties": {}}}},
]
WORDS = [
    "depot",
    "shelf",
    "parcel",
    "green",
    "umbrella",
    "Straße",
    "東京",
    "café",
    "quiet",
    "seven",
    '"quoted"',
    "back\\slash",
]


def value(kind: str, rng: random.Random) -> Any:
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, 3))]
    return {
        "string": " ".join(words),
        "integer": rng.randint(-5, 500),
        "boolean": rng.random() < 0.5,
        "array": words,
        "object": {word: rng.choice((1, None, "x", [1.5])) for word in words},
        "number": rng.choice((1.5, 2, 1e-3)),
    }[kind]


def written(arguments: dict[str, Any]) -> str:
    """A call as the model writes it, with the arguments in the given order."""
    texts = {
        name: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        for name, given in arguments.items()
    }
    parts = [f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items()]
    return "<tool_call>\n<function=book>\n" + "".join(parts) + "</function>\n</tool_call>"


def answer(rng: random.Random) -> str:
    """The model's output for one turn: reasoning, optional content, one to three calls."""
    types = {name: schema["type"] for name, schema in TOOLS[0]["function"]["parameters"]["properties"].items()}  # type: ignore[index]
    calls = []
    for _ in range(rng.randint(1, 3)):
        names = rng.sample(list(types), rng.randint(1, len(types)))
        calls.append(written({name: value(types[name], rng) for name in names}))
    if rng.random() < 0.2:
        calls.append("<tool_call>\n<function=list_rooms>\n</function>\n</tool_call>")
    content = rng.choice(("", "Let me see.\n\n", "I'll book that, one moment, please.\n\n"))
    reasoning = " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 40)))
    return reasoning + "\n</think>\n\n" + content + "\n".join(calls)


def shuffled(given: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    names = list(given)
    rng.shuffle(names)
    return {name: given[name] for name in names}


def drop_reasoning(message: Message, rng: random.Random) -> Message:
    return {name: given for name, given in message.items() if name != "reasoning_content"}


def rename_reasoning(message: Message, rng: random.Random) -> Message:
    return drop_reasoning(message, rng) | {"reasoning": message["reasoning_content"]}


def reasoning_in_blocks(message: Message, rng: random.Random) -> Message:
    text, cut = message["reasoning_content"], rng.randrange(len(message["reasoning_content"]) + 1)
    routed = [{"type": "reasoning.text", "text": part, "index": 0} for part in (text[:cut], text[cut:])]
    blocks = [{"type": "thinking", "thinking": text, "signature": "x"}]
    return drop_reasoning(message, rng) | rng.choice(
        [{"reasoning_details": routed}, {"thinking_blocks": blocks}, {"reasoning_text": text}]
    )


def reorder_keys(message: Message, rng: random.Random) -> Message:
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(shuffled(json.loads(call["function"]["arguments"]), rng))
        calls.append(shuffled({**call, "function": shuffled({**call["function"], "arguments": arguments}, rng)}, rng))
    return shuffled({**message, "tool_calls": calls}, rng)


def serialise_anew(message: Message, rng: random.Random) -> Message:
    def text(arguments: str) -> str:
        return json.dumps(
            json.loads(arguments), indent=rng.choice((None, 2)), ensure_ascii=rng.random() < 0.5, separators=(",", ":")
        )

    calls = [
        {**call, "function": {**call["function"], "arguments": text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def as_objects(message: Message, rng: random.Random) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def fill_with_nulls(message: Message, rng: random.Random) -> Message:
    nothing: dict[str, Any] = {"refusal": None, "audio": None, "function_call": None, "annotations": []}
    return {**message, **nothing, "content": message["content"] or rng.choice((None, ""))}


def content_in_parts(message: Message, rng: random.Random) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}] if message["content"] else None}


CLIENTS: dict[str, tuple[Callable[[Message, random.Random], Message], ...]] = {
    "as it came": (),
    "reasoning dropped": (drop_reasoning,),
    "reasoning renamed": (rename_reasoning,),
    "reasoning in blocks": (reasoning_in_blocks,),
    "keys reordered": (reorder_keys,),
    "arguments serialised anew": (serialise_anew,),
    "arguments as objects": (as_objects,),
    "nulls": (fill_with_nulls,),
    "content in parts": (content_in_parts,),
    "everything at once": (serialise_anew, reorder_keys, fill_with_nulls, drop_reasoning),
}


@pytest.mark.parametrize("client_name", CLIENTS)
@pytest.mark.parametrize("seed", range(3))
def test_tool_loop_reuses_previous_turn_up_to_last_block(client_name: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{client_name} {seed}")

    async def talk(told: Told, client: httpx.AsyncClient) -> None:
        messages: list[Message] = [
            {"role": "system", "content": "Book what people ask for. " * rng.randint(1, 12)},
            {"role": "user", "content": "Two seats, please. " * rng.randint(1, 8)},
        ]
        whole: list[int] = []
        for turn in range(4):
            got = await told.ask(client, messages, answer(rng), tools=TOOLS)
            choice = got["choices"][0]
            assert choice["finish_reason"] == "tool_calls", (client_name, seed, turn)
            prompt = got["prompt_token_ids"]
            assert prompt[: len(whole)] == whole, (client_name, seed, turn)
            expected = (len(whole) - 1) // BLOCK_TOKENS * BLOCK_TOKENS if whole else 0
            assert cached(got) >= expected, (client_name, seed, turn, cached(got), len(whole))
            whole = prompt + choice["token_ids"]
            message = choice["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "done " * rng.randint(1, 30)}
                for call in message["tool_calls"]
            ]
            rng.shuffle(results)
            for change in CLIENTS[client_name]:
                message = change(message, rng)
            messages = [*messages, message, *results]

    converse(tmp_path, talk)

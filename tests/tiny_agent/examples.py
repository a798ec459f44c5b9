"""Hand-made sessions with every shape that rendering must handle, and a small tokenizer trained on them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from scripts.tiny_agent.domain import Example, Turn
from scripts.tiny_agent.render import conversation_text
from scripts.tiny_agent.tokenizer import train


def _tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key} – as written"} for key, kind in parameters.items()}
    function = {
        "name": name,
        "description": f"Does {name}.",
        "parameters": {"type": "object", "properties": properties, "required": [*parameters]},
    }
    return {"type": "function", "function": function}


def _calls(
    *calls: tuple[str, dict[str, Any]], content: str | None = None, reasoning: str | None = None
) -> dict[str, Any]:
    tool_calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return _thought({"role": "assistant", "content": content, "tool_calls": tool_calls}, reasoning)


def _says(content: str, reasoning: str | None = None) -> dict[str, Any]:
    return _thought({"role": "assistant", "content": content}, reasoning)


def _thought(message: dict[str, Any], reasoning: str | None) -> dict[str, Any]:
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def _result(index: int, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": json.dumps(fields)}


def _example(
    session_id: str,
    turns: list[Turn],
    *,
    thinking: bool,
    system: str | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> Example:
    return Example(
        session_id=session_id, unseen=False, system=system, thinking=thinking, tools=tools or [], world={}, turns=turns
    )


_TOOLS = [
    _tool("get_order", order_id="string"),
    _tool("updateOrder", orderId="string", dueDate="string", rush="boolean", tags="array", count="integer"),
]

_TURNS = [
    Turn(
        user="Where is T-4071, and T-4072?",
        goal={},
        messages=[
            _calls(
                ("get_order", {"order_id": "T-4071"}), ("get_order", {"order_id": "T-4072"}), content="I look up both."
            ),
            _result(0, order_id="T-4071", owner="Zoë Lowell", price=12.5),
            _result(1, order_id="T-4072", owner="naïve Ivo", note='says "no"'),
            _says("T-4071 is Zoë's.\n\nT-4072 is naïve Ivo's."),
        ],
    ),
    Turn(
        user="  Rush T-4071, please:\n- tags a, b\n- due 2031-05-07  ",
        goal={},
        messages=[
            _calls(
                (
                    "updateOrder",
                    {"orderId": "T-4071", "dueDate": "2031-05-07", "rush": True, "tags": ["a", "b"], "count": 3},
                )
            ),
            _result(0, error="busy"),
            _calls(("updateOrder", {"orderId": "T-4071", "rush": True})),
            _result(0, order_id="T-4071", rush=True),
            _says("(Done.)"),
        ],
    ),
    Turn(user="Thanks", goal={}, messages=[_says("You are welcome.")]),
]


def _with_reasoning(turns: list[Turn]) -> list[Turn]:
    texts = ["The user asks for it.", '"T-4071" comes first.\n\nThen the other?', "- rush is true"]
    result = []
    for turn in turns:
        messages = [
            {**message, "reasoning_content": texts[index % 3]} if message["role"] == "assistant" else message
            for index, message in enumerate(turn.messages)
        ]
        result.append(Turn(user=turn.user, goal={}, messages=messages))
    return result


EXAMPLES = [
    _example("plain", _TURNS, thinking=False, tools=_TOOLS),
    _example("thinks", _with_reasoning(_TURNS), thinking=True, system=" You help with orders.\n", tools=_TOOLS),
    _example("no-tools", [Turn(user="Hi", goal={}, messages=[_says("Hello.")])], thinking=False, system="Be short."),
    _example("bare", [Turn(user="Hi", goal={}, messages=[_says("Hello.", "A greeting.")])], thinking=True),
]


@cache
def small_tokenizer() -> Tokenizer:
    return train([conversation_text(example, len(example.turns)) for example in EXAMPLES] * 2, vocab_size=400)

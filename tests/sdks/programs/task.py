"""The task of the clients: two tools to be called one after the other, and a second question.

Each program runs in its client's own environment, so this module uses only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

URL, MODE, *WAY = sys.argv[1:] if len(sys.argv) > 2 else ("", "")
"""URL of the server without a trailing slash; `whole` or `streamed`; variant of the client."""
STREAMED = MODE == "streamed"
MODEL = os.environ.get("CLIENT_MODEL", "")

QUESTION = "Book a room with a desk in Graz for two, three nights."
AGAIN = "Thank you. Say it again?"

ROOMS = {"rooms": [{"room_id": "R-17", "price": 81.5}]}
BOOKED = {"booking": "B-5521", "door": "kx-8"}

calls: list[tuple[str, dict[str, Any]]] = []
"""The received tool calls, with the arguments as the client parsed them."""


def search_rooms(city: str, guests: int, features: list[str]) -> str:
    """Search for free rooms.

    Args:
        city: Where
        guests: How many people
        features: What the room must have
    """
    calls.append(("search_rooms", {"city": city, "guests": guests, "features": features}))
    return json.dumps(ROOMS)


def book_room(room_id: str, nights: int) -> str:
    """Book a room.

    Args:
        room_id: Number of the room
        nights: How many nights
    """
    calls.append(("book_room", {"room_id": room_id, "nights": nights}))
    return json.dumps(BOOKED)


FUNCTIONS: dict[str, Callable[..., str]] = {"search_rooms": search_rooms, "book_room": book_room}
PARAMETERS: dict[str, dict[str, Any]] = {
    "search_rooms": {
        "city": {"type": "string"},
        "guests": {"type": "integer"},
        "features": {"type": "array", "items": {"type": "string"}},
    },
    "book_room": {"room_id": {"type": "string"}, "nights": {"type": "integer"}},
}
DESCRIPTIONS = {"search_rooms": "Search for free rooms.", "book_room": "Book a room."}
SCHEMAS: dict[str, Any] = {
    name: {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    for name, properties in PARAMETERS.items()
}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": name, "description": DESCRIPTIONS[name], "parameters": schema, "strict": False}
    for name, schema in SCHEMAS.items()
]


def call(name: str, arguments: str) -> str:
    """Run a tool with its arguments as JSON."""
    return FUNCTIONS[name](**json.loads(arguments))


def chat(complete: Callable[[list[Any]], Any]) -> None:
    """Ask both questions over chat completions; messages that `complete` returns are sent back unchanged."""
    messages: list[Any] = []
    answers: list[Any] = []
    cached: list[int] = []
    for question in (QUESTION, AGAIN):
        messages.append({"role": "user", "content": question})
        while True:
            completion = complete(messages)
            message = completion.choices[0].message
            messages.append(message)
            cached.append(completion.usage.prompt_tokens_details.cached_tokens)
            if not message.tool_calls:
                break
            for asked in message.tool_calls:
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": asked.id,
                        "content": call(asked.function.name, asked.function.arguments),
                    }
                )
        answers.append(message.content)
    report(answers, cached)


def report(answers: list[Any], cached: list[int] | None = None) -> None:
    """Print the report as the last line. `cached`: the cached tokens of each request, if the client exposes them."""
    print("\n" + json.dumps({"calls": calls, "answers": answers, "cached": cached}))

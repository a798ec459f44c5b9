"""The tools of all examples: two ordinary functions over a few orders."""

from __future__ import annotations

import json
from typing import Any

ORDERS: dict[str, dict[str, Any]] = {
    "O-4071": {"order_id": "O-4071", "customer": "Ada Lowell", "item": "lamp", "quantity": 2, "status": "paid"},
    "O-4072": {"order_id": "O-4072", "customer": "Ben Harris", "item": "desk", "quantity": 1, "status": "shipped"},
}

FIRST = "What is the status of order O-4071?"
SECOND = "Please cancel order O-4071."
"""Two turns of one session: each needs a call."""


def orders_get(order_id: str) -> str:
    """Get one order by its number.

    Args:
        order_id: Order number
    """
    return json.dumps(ORDERS.get(order_id, {"error": f"no order {order_id}"}))


def orders_cancel(order_id: str) -> str:
    """Cancel an order. Shipped orders can't be cancelled.

    Args:
        order_id: Order number
    """
    return json.dumps(
        {"order_id": order_id, "status": "cancelled"} if order_id in ORDERS else {"error": f"no order {order_id}"}
    )


FUNCTIONS = {"orders_get": orders_get, "orders_cancel": orders_cancel}

_PARAMETERS = {
    "type": "object",
    "properties": {"order_id": {"type": "string", "description": "Order number"}},
    "required": ["order_id"],
    "additionalProperties": False,
}
DESCRIPTIONS = {
    "orders_get": "Get one order by its number.",
    "orders_cancel": "Cancel an order. Shipped orders can't be cancelled.",
}

OPENAI_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": _PARAMETERS}}
    for name, text in DESCRIPTIONS.items()
]
"""In the format of /v1/chat/completions."""
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": name, "description": text, "parameters": _PARAMETERS, "strict": False}
    for name, text in DESCRIPTIONS.items()
]
"""In the format of /v1/responses."""
ANTHROPIC_TOOLS: Any = [
    {"name": name, "description": text, "input_schema": _PARAMETERS} for name, text in DESCRIPTIONS.items()
]
"""In the format of /v1/messages."""


def call(name: str, arguments: dict[str, Any]) -> str:
    """Run a tool that the model called."""
    return FUNCTIONS[name](**arguments)

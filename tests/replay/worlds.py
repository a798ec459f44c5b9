"""A small world for tests: orders and notes, with a tool for every action."""

from __future__ import annotations

from typing import Any

from agentspec.replay.schema import Session, Turn
from agentspec.replay.world import (
    Calculate,
    Create,
    Delete,
    Fails,
    Find,
    Get,
    Goal,
    Locked,
    Replace,
    Table,
    Update,
    World,
)
from tests.replay.builders import turn, user

TEXT, INTEGER = {"type": "string"}, {"type": "integer"}


def tool(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_order", {"order_id": TEXT}, ["order_id"]),
    tool("find_orders", {"city": TEXT, "tag": TEXT, "word": TEXT, "limit": INTEGER}, []),
    tool("create_order", {"item": TEXT, "count": INTEGER, "city": TEXT}, ["item", "count"]),
    tool("update_order", {"order_id": TEXT, "count": INTEGER, "city": TEXT}, ["order_id"]),
    tool("cancel_order", {"order_id": TEXT}, ["order_id"]),
    tool("delete_order", {"order_id": TEXT}, ["order_id"]),
    tool("edit_note", {"path": TEXT, "old": TEXT, "new": TEXT}, ["path", "old", "new"]),
    tool("write_note", {"path": TEXT, "text": TEXT}, ["path", "text"]),
    tool("add_up", {"expression": TEXT}, ["expression"]),
]
LOCK = Locked(column="status", values=["sent"], error="{key} is {value} already")
ORDERS = Table(
    key="order_id",
    records=[
        {
            "order_id": "A-098",
            "item": "Blue lamp",
            "count": 2,
            "city": "Oslo",
            "status": "open",
            "tags": ["gift", "fragile"],
        },
        {"order_id": "A-099", "item": "chair", "count": 4, "city": "Bergen", "status": "sent", "tags": []},
    ],
    next_key="A-100",
)
NOTES = Table(key="path", records=[{"path": "plan.md", "text": "buy milk, buy tea"}])


def world(*, fails: Fails | None = None) -> World:
    """Return a world; `fails`: of get_order."""
    order_id = {"order_id": "order_id"}
    return World(
        tables={"orders": ORDERS, "notes": NOTES},
        actions={
            "get_order": Get(table="orders", match=order_id, show=["order_id", "item", "status"], fails=fails),
            "find_orders": Find(
                table="orders",
                match={"city": "city"},
                contains={"tag": "tags", "word": "item"},
                limit="limit",
                show=["order_id"],
            ),
            "create_order": Create(
                table="orders", set={"item": "item", "count": "count", "city": "city"}, fixed={"status": "open"}
            ),
            "update_order": Update(
                table="orders",
                match=order_id,
                set={"count": "count", "city": "city"},
                locked=LOCK,
                show=["order_id", "count"],
            ),
            "cancel_order": Update(
                table="orders", match=order_id, fixed={"status": "cancelled"}, locked=LOCK, show=["status"]
            ),
            "delete_order": Delete(table="orders", match=order_id, locked=LOCK),
            "edit_note": Replace(table="notes", match={"path": "path"}, column="text", old="old", new="new"),
            "write_note": Create(table="notes", set={"path": "path", "text": "text"}),
            "add_up": Calculate(expression="expression"),
        },
    )


def ask(text: str = "please", *, goal: Goal | None = None, **fields: Any) -> Turn:
    return turn(user(text), goal=goal, **fields)


def live_session(*turns: Turn, name: str = "live", group: str | None = None, of: World | None = None) -> Session:
    return Session(session_id=name, group=group, turns=list(turns), tools=TOOLS, world=of or world())

"""The subject of a session, as data: a domain is one kind of record (orders, tickets) with its tools.

Hand-written domains (catalog) and generated domains (invented) have the same structure, so every task works with both.
Independent of phrases, tokens and training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentspec.replay.world import Record, Table, ToolAction

Split = Literal["train", "held_out"]
"""The split of values and words: held-out ones never occur in training."""

Verb = Literal["get", "find", "create", "update", "close", "delete", "read", "replace", "calculate"]
"""The function of a tool, independent of its name. `close` sets a final state (cancel, finish, archive); `read` is
`get` of one long text."""

Kind = Literal[
    "code",  # a key such as T-4071
    "person",  # Ada Lowell, or one name
    "people",  # list of persons
    "city",
    "word",  # one or two plain or made-up words
    "title",  # two to five words
    "text",  # a sentence that is passed on as it is
    "page",  # a long text of many lines
    "choice",  # one of Column.choices
    "flag",  # true or false
    "count",  # integer, 1 to a few hundred
    "amount",  # number with up to two decimals
    "date",  # YYYY-MM-DD
    "time",  # HH:MM
    "email",
    "phone",
    "path",  # docs/plan.md
    "tags",  # list of words
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One field of a record, or one parameter of a tool."""

    name: str
    """Its name in JSON: due_date, dueDate."""
    label: str
    """Its name in users' texts: due date."""
    kind: Kind
    description: str = ""
    choices: tuple[str, ...] = ()
    form: str = ""
    """Of a code: its shape, `#` for a digit: "T-####"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One tool of a domain."""

    verb: Verb
    word: str
    """The verb for this tool in users' texts: cancel, look up, book."""
    tool: dict[str, Any]
    """The OpenAI function tool that the model sees."""
    action: ToolAction
    params: dict[str, Column]
    """Parameter name -> the column that it stands for (its name is the column's in the table, its label how people say
    it), in schema order."""
    required: tuple[str, ...]

    @property
    def name(self) -> str:
        name: str = self.tool["function"]["name"]
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """One kind of record, its tools, and the records of one session."""

    noun: str
    """Singular, as in users' texts: order, support ticket."""
    plural: str
    table: str
    key: Column
    columns: tuple[Column, ...]
    """All columns but the key, in record order."""
    operations: tuple[Operation, ...]
    data: Table | None
    """None for domains without records, such as arithmetic."""
    unseen: bool = False
    """Tools, names and parameters of this domain never occur in training."""

    def operation(self, verb: Verb) -> Operation | None:
        """The first tool that does this, if the domain has one."""
        return next((operation for operation in self.operations if operation.verb == verb), None)

    @property
    def records(self) -> list[Record]:
        return self.data.records if self.data is not None else []


@dataclass(kw_only=True, slots=True)
class Turn:
    """One user's turn of a session with its gold trajectory."""

    user: str
    goal: dict[str, Any]
    """`agentspec.replay.world.Goal` as JSON, made from what the gold trajectory did."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Gold: assistant and tool messages in OpenAI's shape, the last one an assistant message without calls. `arguments`
    are JSON text. An assistant message has `reasoning_content` when the session thinks."""


@dataclass(kw_only=True, slots=True)
class Example:
    """One session: what a replay file needs to run it live, and the gold answers that training needs."""

    session_id: str
    unseen: bool
    system: str | None
    thinking: bool
    tools: list[dict[str, Any]]
    world: dict[str, Any]
    """`agentspec.replay.world.World` as JSON: the state before the first turn."""
    turns: list[Turn]

    def messages(self, num_turns: int | None = None) -> list[dict[str, Any]]:
        """All messages of the first turns, in OpenAI's shape, gold answers included."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[:num_turns]:
            messages += [{"role": "user", "content": turn.user}, *turn.messages]
        return messages

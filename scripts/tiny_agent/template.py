"""Hand-written domains without records, and the shorthand for writing them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from agentspec.replay.world import Locked
from scripts.tiny_agent import toolset
from scripts.tiny_agent.domain import Column, Domain, Kind, Operation, Split
from scripts.tiny_agent.toolset import Toolset


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """The parts of a domain that all sessions share."""

    noun: str
    plural: str
    tools: Toolset | None
    """None for domains without records."""
    operations: tuple[Operation, ...]
    num_records: tuple[int, int] = (3, 12)
    """The least and the most."""
    unseen: bool = False

    def domain(self, rng: random.Random, split: Split) -> Domain:
        """The domain with new records; tools and columns are shared and must not be changed."""
        tools = self.tools
        key = tools.key if tools is not None else Column(name="", label="", kind="word")
        rows = (
            toolset.records(rng, split, key, tools.columns, rng.randint(*self.num_records)) if tools is not None else []
        )
        return Domain(
            noun=self.noun,
            plural=self.plural,
            table=tools.table if tools is not None else "",
            key=key,
            columns=tools.columns if tools is not None else (),
            operations=self.operations,
            data=toolset.table(key, rows) if tools is not None else None,
            unseen=self.unseen,
        )


def column(
    name: str, kind: Kind, description: str = "", *, label: str = "", choices: str = "", form: str = ""
) -> Column:
    """A column whose label is its name in plain words; choices are separated by white space."""
    return Column(
        name=name,
        label=label or name.replace("_", " "),
        kind=kind,
        description=description,
        choices=tuple(choices.split()),
        form=form,
    )


def locked(name: str, values: str, error: str) -> Locked:
    """Refuses changes when the column has one of these values; `error` may hold `{key}` and `{value}`."""
    return Locked(column=name, values=values.split(), error=error)

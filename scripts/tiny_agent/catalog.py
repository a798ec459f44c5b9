"""All hand-written domains, by noun."""

from __future__ import annotations

import random
from collections.abc import Sequence

from scripts.tiny_agent import catalog_office, catalog_trade, catalog_unseen
from scripts.tiny_agent.domain import Domain, Split

TEMPLATES = {template.noun: template for template in (*catalog_office.TEMPLATES, *catalog_trade.TEMPLATES)}
"""Domains for training."""
UNSEEN = {template.noun: template for template in catalog_unseen.TEMPLATES}
"""Domains that never occur in training."""


def domains(rng: random.Random, split: Split, names: Sequence[str] | None = None) -> list[Domain]:
    """The domains with these nouns, each with fresh records; without names, all that training may see. Raises KeyError
    for an unknown noun."""
    known = TEMPLATES | UNSEEN
    return [known[name].domain(rng, split) for name in (names if names is not None else TEMPLATES)]

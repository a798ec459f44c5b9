"""All tasks with their shares. A task poses one or more turns, or returns False before it has begun any."""

from __future__ import annotations

from collections.abc import Callable

from scripts.tiny_agent import tasks_chains, tasks_numbers, tasks_pages, tasks_single, tasks_talk
from scripts.tiny_agent.play import Play

Task = Callable[[Play], bool]

TASKS: dict[str, tuple[Task, float]] = {
    "one_fact": (tasks_single.one_fact, 8),
    "several_facts": (tasks_single.several_facts, 5),
    "find": (tasks_single.find, 7),
    "find_all": (tasks_single.find_all, 3),
    "count": (tasks_single.count, 4),
    "facts_of_hits": (tasks_single.facts_of_hits, 4),
    "create": (tasks_single.create, 10),
    "update": (tasks_single.update, 7),
    "end": (tasks_single.end, 5),
    "locked": (tasks_single.locked, 5),
    "not_found": (tasks_single.not_found, 4),
    "parallel_facts": (tasks_chains.parallel_facts, 4),
    "parallel_ends": (tasks_chains.parallel_ends, 2),
    "parallel_creates": (tasks_chains.parallel_creates, 2),
    "parallel_mixed": (tasks_chains.parallel_mixed, 4),
    "find_then_change": (tasks_chains.find_then_change, 6),
    "ambiguous": (tasks_chains.ambiguous, 3),
    "copy_to_new": (tasks_chains.copy_to_new, 10),
    "copy_to_record": (tasks_chains.copy_to_record, 6),
    "calculation": (tasks_numbers.calculation, 14),
    "sum_of_two": (tasks_numbers.sum_of_two, 24),
    "sum_of_found": (tasks_numbers.sum_of_found, 30),
    "read_fact": (tasks_pages.read_fact, 18),
    "replace_line": (tasks_pages.replace_line, 24),
    "missing_value": (tasks_talk.missing_value, 5),
    "missing_setting": (tasks_talk.missing_setting, 2),
    "missing_key": (tasks_talk.missing_key, 2),
    "refusal": (tasks_talk.refusal, 4),
    "small_talk": (tasks_talk.small_talk, 6),
}
"""Task and its weight when a session goes on with something new."""

FOLLOWING: dict[str, tuple[Task, float]] = {
    "follow_fact": (tasks_talk.follow_fact, 3),
    "follow_other": (tasks_talk.follow_other, 2),
    "follow_end": (tasks_talk.follow_end, 3),
    "follow_update": (tasks_talk.follow_update, 3),
}
"""Tasks that need something to refer back to."""

AGAIN = tasks_talk.try_again


def draw_order(play: Play, tasks: dict[str, tuple[Task, float]]) -> list[str]:
    """All names, in an order in which heavy ones tend to come first."""
    return sorted(tasks, key=lambda name: play.rng.random() ** (1 / tasks[name][1]), reverse=True)

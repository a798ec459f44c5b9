"""The caches of a prompt builder are bounded by real memory, and hold nothing of refused prompts."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from agentspec.errors import ContextLengthError
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.prompt import PromptAsk, PromptBuilder
from agentspec.text.sized_cache import SizedCache, held_bytes
from agentspec.text.token_limit import TokenLimit
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from tests.text.sessions import Session, random_turn


def held(root: Any) -> int:
    """Return the bytes of all data reachable from an object."""
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType | Tokenizer):
            seen[id(one)] = one
            waiting += gc.get_referents(one)
    return sum(map(sys.getsizeof, seen.values()))


def too_long(rng: random.Random) -> Iterator[tuple[list[dict[str, Any]], TokenLimit]]:
    """Prompts above the token limit. For some the byte bound shows it, for others only encoding does."""
    for number in range(5):
        text = f"{number} " + "".join(rng.choice("ab é東🙂\n") for _ in range(100_000))
        yield [{"role": "system", "content": text}, {"role": "user", "content": "x"}], TokenLimit(100)
        yield [{"role": "system", "content": "x"}, {"role": "user", "content": text}], TokenLimit(20_000)


def test_refused_prompt_is_not_cached(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    template = ChatTemplate(template.source)
    builder = PromptBuilder(tokenizer, template, TurnMemory())
    builder.build(
        PromptAsk([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], limit=TokenLimit(50_000))
    )
    before = held((builder, template))
    for messages, limit in too_long(random.Random(5)):
        with pytest.raises(ContextLengthError):
            builder.build(PromptAsk(messages, limit=limit))
    assert held((builder, template)) < before + 20_000


def test_system_block_cache_is_bounded_for_prompts_of_any_size(
    tokenizer: Tokenizer, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(template.source)
    monkeypatch.setattr(template, "_system_blocks", SizedCache(1 << 20))
    rng = random.Random(6)
    for number in range(40):
        text = "".join(rng.choice("ab é東🙂") for _ in range(rng.choice((100, 50_000, 500_000))))
        template.cache_system_block(
            template.render([{"role": "system", "content": f"{number} {text}"}, {"role": "user", "content": "x"}])
        )
        assert held(template._system_blocks) < (1 << 20) + 20_000


def test_turn_record_size_covers_its_parsed_arguments(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Parsed arguments of nested brackets need twenty times the memory of their text, non-Latin letters up to eight
    times."""
    memory = TurnMemory(max_bytes=300_000)
    builder = PromptBuilder(tokenizer, template, memory)
    session = Session(builder, tokenizer, random.Random(7))
    for number in range(30):
        lists = ",".join(["[]"] * 500)
        value = f'{{"a{number}": [{lists}]}}'
        call = (
            f"<tool_call>\n<function=search_flights>\n<parameter=filters>\n{value}\n</parameter>\n"
            "</function>\n</tool_call>"
        )
        prompt = session.ask(f"question {number}")
        session.generate(
            prompt, f"Hm.\n</think>\n\n{'🙂東' * 200}\n\n{call if number % 2 else random_turn(session.rng)}"
        )
        assert memory.num_bytes <= 300_000
        assert held(memory) < memory.num_bytes + 20_000
    assert len(memory) > 3


def test_held_bytes_include_the_cached_utf8_copy() -> None:
    for text in ("a" * 1000, "é" * 1000, "東" * 1000, "🙂" * 1000):
        text = text[:999]
        counted = held_bytes([text, {"key": (text, 1)}])
        assert counted >= held([text, {"key": (text, 1)}])
        text.encode()
        assert held_bytes(text) >= sys.getsizeof(text)

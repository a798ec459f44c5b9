"""`skip_special_tokens: false` on the bundled model: the text contains control tokens, except the stop id that ends
it."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.config import EngineConfig
from agentspec.engine.in_process import Engine
from agentspec.types import SamplingParams
from agentspec.wire import FinishEvent, Submit

WRITTEN = "One<|im_start|> two<|im_end|>\nthree"


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine(EngineConfig(device="cpu", memory_gib=0.2, allow_forced_output=True)) as engine:
        yield engine


def written(engine: Engine, *, skips: bool, **sampling: Any) -> tuple[str, int | str | None]:
    """The text and the stop match of an answer whose tokens are those of WRITTEN."""
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(WRITTEN)
    params = SamplingParams(temperature=0.0, max_tokens=len(ids), **sampling)
    prompt = engine.tokenizer.encode("Count.")
    text, stop = "", None
    for event in engine.stream(
        Submit(request_id="a", prompt_ids=prompt, sampling=params, forced_output=ids, skip_special_tokens=skips)
    ):
        text += event.text
        stop = event.stop_match if isinstance(event, FinishEvent) else None
    return text, stop


def test_control_tokens_are_in_the_text_only_if_not_skipped(engine: Engine) -> None:
    assert written(engine, skips=False, ignore_eos=True) == (WRITTEN, None)
    assert written(engine, skips=True, ignore_eos=True) == ("One two\nthree", None)


def test_the_stop_id_is_never_in_the_text(engine: Engine) -> None:
    assert engine.tokenizer is not None
    end = engine.tokenizer.special_ids["<|im_end|>"]
    assert written(engine, skips=False) == ("One<|im_start|> two", end)


def test_stop_strings_match_the_visible_text_only(engine: Engine) -> None:
    assert written(engine, skips=False, ignore_eos=True, stop=("<|im_end|>",)) == ("One<|im_start|> two", "<|im_end|>")
    assert written(engine, skips=True, ignore_eos=True, stop=("<|im_end|>",)) == ("One two\nthree", None)
    assert written(engine, skips=True, ignore_eos=True, stop=("e two",)) == ("On", "e two")

"""Fixtures: a real text pipeline over a byte tokenizer, the bundled model's pipeline, and an app around a scripted
engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.engine import bundled
from agentspec.server.app import create_app
from agentspec.server.pipeline import TextPipeline
from agentspec.server.transport import InProcessTransport
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.prompt import PromptBuilder
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from tests.fakes.engine_client import ScriptedEngine
from tests.fakes.text import END_OF_TURN, byte_backend

# A minimal template in the style of Qwen's: calls are rendered as `<function=`, so that the dialect is detected.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}calls are <tool_call><function=NAME></function></tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


@pytest.fixture
def pipeline() -> TextPipeline:
    tokenizer = Tokenizer(byte_backend(), eos_token=END_OF_TURN)
    return TextPipeline(tokenizer, PromptBuilder(tokenizer, ChatTemplate(TEMPLATE), TurnMemory()))


@pytest.fixture(scope="module")
def bundled_text() -> TextPipeline:
    """The pipeline of tiny-agent."""
    text = TextPipeline.from_checkpoint(Tokenizer.from_directory(bundled.DIRECTORY), bundled.DIRECTORY)
    assert text is not None
    return text


@pytest.fixture
def connect(pipeline: TextPipeline) -> Callable[..., httpx.AsyncClient]:
    """An HTTP client for an app around the given engine. Other arguments are passed on to create_app."""

    def open_client(engine: ScriptedEngine, **overrides: Any) -> httpx.AsyncClient:
        app = create_app(engine, overrides.pop("pipeline", pipeline), **overrides)
        return httpx.AsyncClient(transport=InProcessTransport(app), base_url="http://in-process", timeout=None)

    return open_client

"""The bundled model's tokenizer and chat template."""

from __future__ import annotations

import pytest

from agentspec.engine import bundled
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None, f"{bundled.DIRECTORY} has no tokenizer.json"
    return tokenizer


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    template = ChatTemplate.from_directory(bundled.DIRECTORY)
    assert template is not None, f"{bundled.DIRECTORY} has no chat template"
    return template

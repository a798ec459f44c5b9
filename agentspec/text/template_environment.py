"""The Jinja environment of chat templates: transformers' dialect, in Jinja's immutable sandbox.

Owns filters, globals and tags. Templates come from checkpoints and are untrusted: nothing here may let one run code or
access files. Knows nothing of messages.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_OF_DICTS = frozenset(dir(dict))
_READING_DICTS = frozenset({"get", "items", "keys", "values"})
_OF_LOOPS = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
_OF_TEXTS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "split"})


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with fast paths for common attribute lookups, which took half the time of a long
    prompt."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (
            (kind is str and attribute in _OF_TEXTS)
            or (kind is LoopContext and attribute in _OF_LOOPS)
            or (kind is dict and attribute in _READING_DICTS)
            or (kind is _Namespace and not attribute.startswith("_") and hasattr(obj, attribute))
        ):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets. When rendering it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Jinja's namespace, refusing attributes that could reach Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template can't set {name!r}: names that begin with an underscore are refused")


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON with keys in order. Jinja's own filter sorts keys and escapes for HTML, unlike the training
    text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return a new environment, equivalent to that of transformers' `apply_chat_template`."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment

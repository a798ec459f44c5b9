"""The constraints that a body puts on its answer: response_format, tool_choice, and vLLM's fields for constrained
output.

Owns these structs and their meaning as OutputForm and ToolDemand. Knows nothing of grammars, prompts or the rest of a
body.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.files import MAX_NESTING, is_too_deep
from agentspec.text.constraints import OutputForm, ToolDemand


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    """Without effect: the answer always fits the schema."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat

Schema = dict[str, Any] | str
"""A JSON schema, or its JSON text."""
Choices = Annotated[list[str], msgspec.Meta(min_length=1)]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's field; exactly one member is set."""

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionName


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], msgspec.Meta(min_length=1)]


class AllowedToolsChoice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    allowed_tools: AllowedTools


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedToolsChoice

_FORM_OF = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
}


def output_form(asked: dict[str, Any], response_format: ResponseFormat | None) -> OutputForm | None:
    """The requested form of the output; None when it is unconstrained.

    asked: values of vLLM's fields (json, regex, choice, grammar, json_object), keyed by the field's name in the body;
    None and False mean absent. Raises RequestError for more than one form, or a schema that is not a JSON object."""
    forms = []
    if isinstance(response_format, JsonObjectFormat):
        forms.append(OutputForm(kind="json_object", source=None, field="response_format"))
    elif isinstance(response_format, JsonSchemaFormat):
        forms.append(
            OutputForm(
                kind="json_schema",
                source=response_format.json_schema.schema,
                field="response_format.json_schema.schema",
            )
        )
    for field, value in asked.items():
        if value is None or value is False:
            continue
        kind: Any = _FORM_OF[field.removeprefix("structured_outputs.").removeprefix("guided_")]
        source = _schema(field, value) if kind == "json_schema" else None if kind == "json_object" else value
        forms.append(OutputForm(kind=kind, source=source, field=field))
    if len(forms) > 1:
        raise RequestError(
            forms[1].field, forms[1].source, f"can't be joined with {forms[0].field}: an answer has one form"
        )
    return forms[0] if forms else None


def tool_demand(choice: ToolChoice, names: list[str], *, parallel: bool) -> tuple[ToolDemand, frozenset[str] | None]:
    """The demand, and the tools that may be called (None: all of `names`, the request's tools).

    Raises RequestError for a choice that names tools which are not in the request."""
    if isinstance(choice, NamedTool):
        _check_known("tool_choice.function.name", choice.function.name, names)
        return ToolDemand(choice="required", name=choice.function.name, parallel=parallel), None
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        for index, tool in enumerate(allowed.tools):
            _check_known(f"tool_choice.allowed_tools.tools[{index}].function.name", tool.function.name, names)
        callable_names = frozenset(tool.function.name for tool in allowed.tools)
        if callable_names == frozenset(names):
            return ToolDemand(choice=allowed.mode, parallel=parallel), None
        if allowed.mode == "auto":
            raise RequestError(
                "tool_choice.allowed_tools.mode",
                "auto",
                "is served only when all tools are allowed; a part of them can be required",
            )
        return ToolDemand(choice="required", parallel=parallel), callable_names
    if choice == "required" and not names:
        raise RequestError("tool_choice", choice, "needs tools")
    return ToolDemand(choice=choice, parallel=parallel), None


def _check_known(field: str, name: str, names: list[str]) -> None:
    if name not in names:
        raise RequestError(field, name, "is not the name of one of the request's tools")


def _schema(field: str, value: Schema) -> Any:
    if not isinstance(value, str):
        return value
    try:
        schema = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(field, value, f"is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise RequestError(field, value, "must be the JSON text of an object")
    if is_too_deep(schema):
        raise RequestError(field, value, f"is nested deeper than {MAX_NESTING} levels")
    return schema

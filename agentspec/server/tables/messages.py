"""The fields of Anthropic's /v1/messages, and of its count_tokens. Words are Markdown, for docs/api.md."""

from __future__ import annotations

from agentspec.server.fields import FieldTable, accepted, refused, works

_PROMPT: FieldTable = {
    "model": works("required; must be a name of the served model (404 otherwise): the checkpoint's, or those of `--served-model-name`"),
    "messages": works(
        "required. `user`, `assistant` and, where the template takes it, `system`. Blocks: `text`, `tool_use`, `tool_result` (a text or text "
        "blocks), "
        "`thinking`, `redacted_thinking`. Texts of one message are joined as they are. Results stand before the text of their message; one with "
        "`is_error` reaches the model behind `Error: `. Assistant messages in a row are one turn; the last message can't be one. A redacted block is "
        "another provider's and has no text to show the model. What else a block carries is left out"
    ),
    "system": works("a text or text blocks"),
    "tools": works(
        "of your own, with an `input_schema`; Anthropic's (`type: web_search_...`) are refused. `strict` holds the call to its schema. "
        "`input_examples`, `defer_loading` and callers other than `direct` are refused; `eager_input_streaming` is always on"
    ),
    "tool_choice": works("`auto`, `any`, `tool` or `none`, with `disable_parallel_tool_use`; the prompt is the same whatever the choice"),
    "thinking": works(
        "`disabled` and `enabled` set the template's `enable_thinking`, and are refused where it has none. `adaptive` is `enabled` where there is "
        "the "
        "choice. Without the field the template decides. `budget_tokens` (at least 1024, below `max_tokens`) is an aim that the model isn't told "
        "of: only "
        "`max_tokens` bounds its thinking. `display: omitted` leaves the text out of the answer; there are no summaries"
    ),
    "output_config": works(
        "`format` (a JSON schema) constrains the answer. `effort` goes to a template that has `reasoning_effort`, and elsewhere only `high`, the "
        "default, "
        "is taken"
    ),
    "cache_control": works("in blocks of `system` and `messages`, in tools, and at the root, where it means the end of the last message: 4 at most"),
    "cache_salt": works("not Anthropic's; as in chat"),
    "container": refused("there is none"),
    "context_management": refused("histories are rendered as they are sent"),
    "mcp_servers": refused("tools are the client's to call", []),
    "input": refused("of responses"),
    "n": refused("of chat: there is one answer", 1),
    "prompt": refused("of completions"),
    "response_format": refused("of chat; `output_config.format` is served"),
    "stop": refused("of chat; `stop_sequences` is served", []),
    "diagnostics": accepted(),
    "inference_geo": accepted("it runs where the server is"),
    "speed": accepted("there is one speed"),
}

_ANSWER: FieldTable = {
    "max_tokens": works("required. 0 computes the prompt only, and leaves it in the cache"),
    "temperature": works("0 to 100, default 1; 0 is greedy"),
    "top_p": works("(0, 1], default 1"),
    "top_k": works("0 (all) to the vocabulary's size"),
    "stop_sequences": works("up to 16 texts; never part of the answer"),
    "stream": works("events as Anthropic documents them, without `ping`. An error half-way is the last event"),
}

_LABELS: FieldTable = {"metadata": accepted("labels"), "service_tier": accepted("there is one tier")}

MESSAGES: FieldTable = {**_PROMPT, **_ANSWER, **_LABELS}

COUNT: FieldTable = {**_PROMPT, **{name: accepted("no part of the prompt") for name in _ANSWER}, **_LABELS}

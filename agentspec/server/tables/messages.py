"""The fields of Anthropic's /v1/messages, and of its count_tokens. Descriptions are Markdown, for docs/api.md."""

from __future__ import annotations

from agentspec.server.fields import FieldTable, accepted, refused, works

_PROMPT: FieldTable = {
    "model": works(
        "required; must be a name of the served model (404 otherwise): the checkpoint's, or those of "
        "`--served-model-name`"
    ),
    "messages": works(
        "required. `user`, `assistant` and, [anywhere](#chat), `system` or `developer`. Blocks: `text`, `tool_use`, "
        "`tool_result` (a text or parts), `thinking`, `redacted_thinking`. Texts of one message are joined as they "
        "are. Results come before the text of their message, wherever they stand in it; one with `is_error` reaches "
        "the model behind `Error: `. Assistant messages in a row are one turn. If the last message is one, the answer "
        "goes on from its text, without thinking, and holds only what is new; it can't hold a `tool_use` then. A "
        "redacted block is another provider's and has no text to show the model. Of other blocks and parts "
        "(`document`, `search_result`, the uses and results of tools that Anthropic runs) the model reads the [texts "
        "that they hold](#blocks-with-texts), and of those without any nothing; images are refused, or told of in "
        "words ([`--images`](#the-server)). What else a block carries is left out"
    ),
    "system": works("a text or text blocks"),
    "tools": works(
        "of your own, with an `input_schema`; `strict` holds the call to it. `bash_20250124`, `bash_20241022` and "
        "`memory_20250818`, which stand for a schema, are shown with it. Anthropic's other tools "
        "(`web_search_20250305`, `text_editor_...`, `computer_...`, `mcp_toolset`...) are left out, and the header "
        "`x-agentspec-ignored-fields` has `tools[web_search_20250305]`. `defer_loading` [works](#deferred-tools). "
        "`allowed_callers`, `input_examples` and `eager_input_streaming` are taken, without effect: every tool is "
        "called directly, and streams its arguments as they are written"
    ),
    "tool_choice": works(
        "`auto`, `any`, `tool` or `none`, with `disable_parallel_tool_use`; the prompt is the same whatever the "
        "choice. A tool that was left out can't be chosen"
    ),
    "thinking": works(
        "`enabled`, `adaptive` and `disabled` set the template's `enable_thinking`. Without the field, and where the "
        "template has no such variable, it decides; `disabled` is refused if it begins the answer with thinking "
        "nevertheless. `budget_tokens`, any number, is an aim that the model isn't told of: only `max_tokens` bounds "
        "its thinking. `display: omitted` leaves the text out of the answer; there are no summaries"
    ),
    "output_config": works(
        "`format` (a JSON schema) constrains the answer. `effort` is any text, as `reasoning_effort` in [chat](#chat)"
    ),
    "output_format": works("the older name of `output_config.format`"),
    "context_management": works(
        "`edits` of what the model is shown: `clear_thinking_20251015` and `clear_tool_uses_20250919`, see "
        "[edits](#edits-of-a-conversation); others (`compact_20260112`) are refused"
    ),
    "cache_control": works(
        "in blocks of `system` and `messages`, in tools, and at the root, where it means the end of the last message: "
        "4 at most"
    ),
    "cache_salt": works("not Anthropic's; as in chat"),
    "container": refused("there is none"),
    "compaction": refused("nothing is summarised here"),
    "mcp_servers": refused("tools are the client's to call", []),
    "input": refused("of responses"),
    "n": refused("of chat: there is one answer", 1),
    "prompt": refused("of completions"),
    "response_format": refused("of chat; `output_config.format` is served"),
    "stop": refused("of chat; `stop_sequences` is served", []),
    "thread": refused("a conversation is sent whole"),
    "billing_policy": accepted("nothing is billed"),
    "diagnostics": accepted(),
    "fallback_credit_token": accepted("nothing is billed"),
    "fallbacks": accepted("there is one model"),
    "inference_geo": accepted("it runs where the server is"),
    "speed": accepted("there is one speed"),
}

_ANSWER: FieldTable = {
    "max_tokens": works(
        "required. 0 computes the prompt only, and leaves it in the cache; more than the context leaves is "
        "[clamped](#limits-beyond-the-context)"
    ),
    "temperature": works("0 to 100, default 1; 0 is greedy"),
    "top_p": works("(0, 1], default 1"),
    "top_k": works("0 (all, and so is -1) to the vocabulary's size"),
    "stop_sequences": works("up to 16 texts; never part of the answer"),
    "stream": works("events as Anthropic documents them, without `ping`. An error half-way is the last event"),
}

_LABELS: FieldTable = {"metadata": accepted("labels"), "service_tier": accepted("there is one tier")}

MESSAGES: FieldTable = {**_PROMPT, **_ANSWER, **_LABELS}

COUNT: FieldTable = {**_PROMPT, **{name: accepted("no part of the prompt") for name in _ANSWER}, **_LABELS}

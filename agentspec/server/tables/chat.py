"""The fields of /v1/chat/completions, and of endpoints with the same bodies. Descriptions are Markdown, for
docs/api.md."""

from __future__ import annotations

from agentspec.server.fields import FieldTable, accepted, refused, works
from agentspec.server.tables.shared import GENERATION, LABELS, SERVERS

CHAT: FieldTable = {
    **GENERATION,
    "messages": works(
        "`system`, `developer`, `user`, `assistant` and `tool`, in any order that the template takes (system messages "
        "anywhere: below); text, as it is or in parts; images are refused, or told of in words "
        "([`--images`](#the-server)). Parts may have the types `input_text`, `output_text`, `refusal` (each a text) "
        "and `thinking` (reasoning), too. `tool_calls`, `tool_call_id` and reasoning (below) are read; what else a "
        "message, a part or a call carries is left out"
    ),
    "max_tokens": works(
        "new tokens at most; up to the context by default. [More than the context leaves](#limits-beyond-the-context) "
        "is clamped"
    ),
    "max_completion_tokens": works("another name for `max_tokens`"),
    "tools": works(
        "functions. With `strict: true` a call is held to the tool's schema; the flag is not shown to the model, so "
        "the prompt is the same with and without it"
    ),
    "tool_choice": works(
        "`auto`; `required`: at least one call; a function by name: that one; `none`: no call. `allowed_tools` with "
        "the mode `required` takes a part of the tools, with the mode `auto` all of them. The prompt shows every tool "
        "whatever the choice, so its prefix stays the same; with `none` the token that opens a call gets a bias of "
        "-100 (unless `logit_bias` has one for it), and nothing is taken for a call"
    ),
    "parallel_tool_calls": works("true by default; false: one call at most"),
    "response_format": works(
        "`text`, `json_object`, or `json_schema` with its `schema` (`strict` or not: the content always fits)"
    ),
    "logprobs": works(
        "true: the log-probabilities of the content's tokens by the model's own distribution, before penalties, bias, "
        "temperature and constraints. Tokens of reasoning and of calls are not among them"
    ),
    "top_logprobs": works("0 to 20 likely tokens at each place, with `logprobs`"),
    "reasoning_effort": works(
        "`none` switches thinking off where the template has `enable_thinking`; every other text goes to a template "
        "that has a variable of this name. Without effect where the template has no such variable"
    ),
    "chat_template_kwargs": works("variables for the checkpoint's template, such as `enable_thinking`"),
    "continue_final_message": works(
        "of vLLM's: true with `add_generation_prompt: false`, and an assistant message without calls at the end: the "
        "answer goes on from its text as it is, and holds only what is new. What is demanded of an answer's form "
        "counts for that. A text that opens a think block, and doesn't close it, goes on with reasoning"
    ),
    "add_generation_prompt": works("of vLLM's: false with `continue_final_message: true`, and true without"),
    "audio": refused("there is no audio"),
    "chat_template": refused("of vLLM's: the checkpoint's template is what prefixes are cached by"),
    "documents": refused("of vLLM's", []),
    "echo": refused("of vLLM's", False),
    "function_call": refused("of the API before tools", "none"),
    "functions": refused("of the API before tools", []),
    "modalities": refused("there is text alone", ["text"]),
    "separate_reasoning": refused("of SGLang's", True),
    "web_search_options": refused("there is no search"),
    "best_of": refused("of completions", 1),
    "breakpoints": refused("of completions: the template marks them", []),
    "input": refused("of responses"),
    "instructions": refused("of responses"),
    "max_output_tokens": refused("of responses"),
    "output_config": refused("of messages"),
    "previous_response_id": refused("of responses"),
    "prompt": refused("of completions"),
    "stop_sequences": refused("of messages", []),
    "suffix": refused("of completions", ""),
    "system": refused("of messages"),
    **LABELS,
    **SERVERS,
    "mm_processor_kwargs": accepted("of vLLM's"),
    "moderation": accepted("nothing is moderated"),
    "stream_reasoning": accepted("of SGLang's: reasoning always streams"),
}

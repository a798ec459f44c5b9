"""The fields of /v1/responses, and of its input_tokens. Descriptions are Markdown, for docs/api.md."""

from __future__ import annotations

from agentspec.server.fields import FieldTable, accepted, refused, works
from agentspec.server.tables.shared import SAMPLING

RESPONSES: FieldTable = {
    "model": works(
        "required; must be a name of the served model (404 otherwise): the checkpoint's, or those of "
        "`--served-model-name`"
    ),
    "input": works(
        "required. A text, or items: `message` (`input_text`, `output_text` and `refusal` parts), `reasoning`, calls "
        "and their results, `item_reference`, [see below](#items). Images are refused, or told of in words "
        "([`--images`](#the-server)). What else an item or a part carries is left out"
    ),
    "instructions": works(
        "stands before the conversation, like a system message. It isn't carried over by `previous_response_id`"
    ),
    "previous_response_id": works(
        "the stored response that this one continues; 404 if it, or one before it, is no longer there"
    ),
    "store": works("default true: keep the response for the endpoints that read it"),
    "stream": works("events as OpenAI documents them"),
    "stream_options": works("`include_obfuscation` is taken as false"),
    "max_output_tokens": works("at least 1; up to the context by default; [clamped](#limits-beyond-the-context) to it"),
    "tools": works(
        "`function`, `custom` and `namespace`; hosted ones are left out, and the answer says so, [see "
        "below](#tools-of-responses)"
    ),
    "tool_choice": works(
        "`auto`, `none`, `required`, a `function` or `custom` tool, `allowed_tools`. A hosted tool is refused"
    ),
    "parallel_tool_calls": works("true by default; false: one call at most"),
    "text": works(
        "`format`: `text`, `json_object`, `json_schema`, which is held to whatever its `strict` says. `verbosity` has "
        "no effect"
    ),
    "reasoning": works(
        "`effort` is any text, as `reasoning_effort` in [chat](#chat). `summary` has no effect: reasoning items hold "
        "the reasoning itself"
    ),
    "include": works(
        "`message.output_text.logprobs`; `reasoning.encrypted_content`, [see below](#items). What OpenAI's hosted "
        "tools would add is taken and adds nothing; other values are left out, and the answer says so (`include.NAME`)"
    ),
    "top_logprobs": works("0 to 20 likely tokens beside each, with `include`"),
    **{name: SAMPLING[name] for name in ("temperature", "top_p")},
    **{
        name: works(f"{known.words}; not OpenAI's")
        for name, known in SAMPLING.items()
        if name not in ("temperature", "top_p")
    },
    "metadata": works("labels, 16 pairs at most; answers repeat them"),
    "prompt_cache_key": works("names the session, if the header `x-session-id` doesn't"),
    "safety_identifier": works("a label; answers repeat it"),
    "user": works("a label; answers repeat it"),
    "chat_template_kwargs": works("not OpenAI's; as in chat"),
    "cache_salt": works("not OpenAI's; as in chat"),
    "min_tokens": works("not OpenAI's; as in chat"),
    "ignore_eos": works("not OpenAI's; as in chat"),
    "background": refused("answers are waited for", False),
    "context_management": refused("histories are rendered as they are sent", []),
    "conversation": refused("`previous_response_id` is served"),
    "image": refused("there are no images"),
    "prompt": refused("no templates of prompts are kept"),
    "truncation": refused(
        "nothing is dropped from a conversation: one that is too long is an error", "disabled", "auto"
    ),
    "logit_bias": refused("of chat", {}),
    "logprobs": refused("of chat; `include` is served", False),
    "max_completion_tokens": refused("of chat"),
    "max_tokens": refused("of chat"),
    "messages": refused("of chat"),
    "n": refused("of chat: there is one answer", 1),
    "reasoning_effort": refused("of chat; `reasoning.effort` is served"),
    "response_format": refused("of chat; `text.format` is served"),
    "stop": refused("of chat", []),
    "structured_outputs": refused("of chat"),
    "system": refused("of messages"),
    "access_programs": accepted(),
    "client_metadata": accepted("labels"),
    "max_tool_calls": accepted("it bounds the calls of hosted tools, and there are none"),
    "moderation": accepted("nothing is moderated"),
    "prompt_cache_options": accepted("prefixes are cached without being asked"),
    "prompt_cache_retention": accepted("what was used last stays longest"),
    "service_tier": accepted("there is one tier"),
    "verbosity": accepted("of chat; the model isn't told, as by `text.verbosity`"),
}

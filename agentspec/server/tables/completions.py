"""The fields of /v1/completions. Descriptions are Markdown, for docs/api.md."""

from __future__ import annotations

from agentspec.server.fields import FieldTable, refused, works
from agentspec.server.tables.shared import GENERATION, LABELS, SERVERS

COMPLETIONS: FieldTable = {
    **GENERATION,
    "prompt": works(
        "a text, a list of token ids, or a list of either; several prompts become choices in their order, `n` for "
        "each, 2048 at most"
    ),
    "max_tokens": works(
        "new tokens at most; 16 by default, as OpenAI has it; 0 computes the prompt only. [More than the context "
        "leaves](#limits-beyond-the-context) is clamped"
    ),
    "best_of": works("must be `n`: every choice is shown"),
    "echo": works("put the prompt before the answer"),
    "breakpoints": works(
        "not OpenAI's: places where later prompts may part from this one, as the chat template marks them for chat. A "
        'list of `{"offset": 812, "kind": "system"}`, ascending, in tokens; `system` is the end of what sessions '
        "share, `user` the end of the last user message. The prefix cache keeps a checkpoint at each (rounded down to "
        "64 tokens). With one prompt only"
    ),
    "logprobs": works(
        "0 to 20: the log-probability of every generated token by the model's own distribution, and the most likely "
        "tokens there; with `echo` of the prompt's tokens, too"
    ),
    "add_special_tokens": refused("of vLLM's: the tokenizers of this family add none", False, True),
    "prompt_embeds": refused("of vLLM's"),
    "response_format": refused("of vLLM's; `structured_outputs` is served"),
    "suffix": refused("nothing is inserted", ""),
    "chat_template_kwargs": refused("of chat", {}),
    "input": refused("of responses"),
    "max_completion_tokens": refused("of chat"),
    "messages": refused("of chat"),
    "reasoning_effort": refused("of chat"),
    "system": refused("of messages"),
    "tool_choice": refused("of chat", "none", "auto"),
    "tools": refused("of chat", []),
    "top_logprobs": refused("of chat", 0),
    **LABELS,
    **SERVERS,
}

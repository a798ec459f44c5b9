"""The fields of /tokenize and /detokenize. Descriptions are Markdown, for docs/api.md."""

from __future__ import annotations

from agentspec.server.fields import FieldTable, refused, works

TOKENIZE: FieldTable = {
    "prompt": works("a text, where there are no `messages`"),
    "messages": works(
        "chat messages, where there is no `prompt`: the ids are those that chat would run, turns that were recognised "
        "included"
    ),
    "tools": works("with messages, as in chat"),
    "chat_template_kwargs": works("with messages, as in chat"),
    "reasoning_effort": works("with messages, as in chat"),
    "cache_salt": works("with messages, as in chat"),
    "model": works("may be absent"),
    "return_token_strs": works("add `token_strs`: each token as tokenizer.json spells it"),
    "add_special_tokens": works("without effect: the tokenizers of this family add none"),
    "continue_final_message": works("with messages and `add_generation_prompt: false`, as in chat"),
    "add_generation_prompt": works(
        "with messages; false: the ids of the messages alone, without those that open an answer"
    ),
    "chat_template": refused("of vLLM's"),
}

DETOKENIZE: FieldTable = {
    "tokens": works("token ids"),
    "model": works("may be absent"),
    "skip_special_tokens": refused("control tokens are written out", False),
}

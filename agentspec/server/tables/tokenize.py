"""The fields of /tokenize and /detokenize. Words are Markdown, for docs/api.md."""

from __future__ import annotations

from agentspec.server.fields import FieldTable, refused, works

TOKENIZE: FieldTable = {
    "prompt": works("a text, where there are no `messages`"),
    "messages": works("chat messages, where there is no `prompt`: the ids are those that chat would run, turns that were recognised included"),
    "tools": works("with messages, as in chat"),
    "chat_template_kwargs": works("with messages, as in chat"),
    "reasoning_effort": works("with messages, as in chat"),
    "cache_salt": works("with messages, as in chat"),
    "model": works("may be absent"),
    "return_token_strs": works("add `token_strs`: each token as tokenizer.json spells it"),
    "add_special_tokens": works("without effect: the tokenizers of this family add none"),
    "add_generation_prompt": refused("of vLLM's", True),
    "chat_template": refused("of vLLM's"),
    "continue_final_message": refused("of vLLM's", False),
}

DETOKENIZE: FieldTable = {
    "tokens": works("token ids"),
    "model": works("may be absent"),
    "skip_special_tokens": refused("control tokens are written out", False),
}

"""Fields of more than one of OpenAI's endpoints. Descriptions are Markdown, for docs/api.md."""

from __future__ import annotations

from agentspec.server.fields import FieldTable, accepted, refused, works

SAMPLING: FieldTable = {
    "temperature": works("0 to 100, default 1; 0 is greedy"),
    "top_p": works("(0, 1], default 1"),
    "top_k": works("0 (all, and so is -1) to the vocabulary's size"),
    "min_p": works("[0, 1), default 0"),
    "presence_penalty": works("-2 to 2, over generated tokens"),
    "frequency_penalty": works("-2 to 2, over generated tokens"),
    "repetition_penalty": works("(0, 10], default 1; over prompt and generated tokens"),
    "seed": works(
        "0 to 2^63 - 1; the same seed gives the same tokens whatever runs beside it, up to "
        "[rounding](numerics.md#on-a-cuda-device)"
    ),
}

GENERATION: FieldTable = {
    "model": works(
        "required; must be a name of the served model (404 otherwise): the checkpoint's, or those of "
        "`--served-model-name`"
    ),
    "n": works("1 to 128 choices of each prompt. With a `seed`, choice i is drawn with `seed` + i"),
    "stream": works("server-sent events"),
    "stream_options": works(
        "`include_usage` adds a last chunk with the usage; `continuous_usage_stats` (of vLLM's) has every chunk say "
        "how many tokens its choice has so far, see [streams](#streams); `include_obfuscation` is taken as false"
    ),
    **SAMPLING,
    "logit_bias": works("token id to bias, -100 to 100"),
    "stop": works("one text or up to 16; never part of the answer"),
    "stop_token_ids": works("up to 16 ids beside the model's own"),
    "ignore_eos": works("go on behind the model's own stop ids"),
    "min_tokens": works(
        "0 by default, up to `max_tokens`: no stop id and no stop string ends the answer before so many tokens (one "
        "that is complete with a later token does). A form that is complete before is refused half-way, by this name. "
        "Beside `ignore_eos` without `stop_token_ids` it costs nothing; otherwise such a request waits for the host "
        "between its steps up to there, as one with a form does. Refused where acceptance is forced, but beside "
        "`ignore_eos`"
    ),
    "structured_outputs": works(
        "one of `json` (a JSON schema, or its text), `regex`, `choice` (a list of texts), `grammar` (EBNF in "
        "xgrammar's notation, from the rule `root`), `json_object: true`: the answer is of this form, as vLLM's "
        "clients ask for it. One form a request"
    ),
    "guided_json": works("`structured_outputs.json` by its older name"),
    "guided_regex": works("`structured_outputs.regex` by its older name"),
    "guided_choice": works("`structured_outputs.choice` by its older name"),
    "guided_grammar": works("`structured_outputs.grammar` by its older name"),
    "return_token_ids": works(
        'true: add the ids of prompt and answer, see below; `"output"`: those of the answer alone'
    ),
    "skip_special_tokens": works(
        "of vLLM's: false has control tokens that are generated, such as those around turns, stand in the text, and in "
        "that of an echoed prompt. The stop id that ends an answer is no part of its text either way. True by default. "
        "`<think>` and the tags of calls are no control tokens"
    ),
    "forced_output": works(
        "token ids, for benchmarks: the answer is these tokens, whatever the model says, after a full forward pass and "
        "with drafts accepted against them. Stops and `max_tokens` end it as ever; behind its last token the answer is "
        "free. Only a server started with `--allow-forced-output` takes it, and not with a constrained answer"
    ),
    "prompt_cache_key": works("names the session, if the header `x-session-id` doesn't"),
    "cache_salt": works(
        "prefixes are shared only among requests with the same salt; with [keys](#keys) also of the same key or group "
        "alone"
    ),
}
"""Generation fields of chat and completions."""

LABELS: FieldTable = {
    "user": accepted("a label"),
    "safety_identifier": accepted("a label"),
    "metadata": accepted("labels"),
    "client_metadata": accepted("labels"),
    "service_tier": accepted("there is one tier"),
    "store": accepted("nothing is kept"),
    "verbosity": accepted("the model isn't told"),
    "prompt_cache_options": accepted("prefixes are cached without being asked"),
    "prompt_cache_retention": accepted("what was used last stays longest"),
    "prediction": accepted("a hint for speed"),
}
"""Fields of chat and completions without effect on this server."""

SERVERS: FieldTable = {
    "allowed_token_ids": refused("of vLLM's", []),
    "bad_words": refused("of vLLM's", []),
    "custom_logit_processor": refused("of SGLang's"),
    "detokenize": refused("of vLLM's", True),
    "early_stopping": refused("of vLLM's", False),
    "ebnf": refused("of SGLang's; `structured_outputs.grammar` is served"),
    "guided_whitespace_pattern": refused("of vLLM's"),
    "include_stop_str_in_output": refused("of vLLM's", False),
    "length_penalty": refused("of vLLM's", 1, 1.0),
    "logits_processors": refused("of vLLM's", []),
    "lora_path": refused("of SGLang's"),
    "no_stop_trim": refused("of SGLang's", False),
    "prompt_logprobs": refused("of vLLM's; `/v1/completions` scores a prompt by `echo` with `logprobs`"),
    "regex": refused("of SGLang's; `structured_outputs.regex` is served"),
    "return_hidden_states": refused("of SGLang's", False),
    "return_tokens_as_token_ids": refused("of vLLM's", False),
    "session_params": refused("of SGLang's"),
    "truncate_prompt_tokens": refused("of vLLM's", -1),
    "use_beam_search": refused("of vLLM's", False),
    "bootstrap_host": accepted("of SGLang's"),
    "bootstrap_port": accepted("of SGLang's"),
    "bootstrap_room": accepted("of SGLang's"),
    "data_parallel_rank": accepted("of SGLang's"),
    "guided_decoding_backend": accepted("of vLLM's: there is one"),
    "kv_transfer_params": accepted("of vLLM's"),
    "priority": accepted("of vLLM's: requests are served by the age of their sessions"),
    "request_id": accepted("of vLLM's"),
    "rid": accepted("of SGLang's"),
    "spaces_between_special_tokens": accepted("of vLLM's"),
    "vllm_xargs": accepted("of vLLM's"),
}
"""Fields of other servers' generation endpoints."""

"""Text to train the sample tokenizer on: English about tools and code, JSON, and the chat format's own markup.

All of it is made up here from the word lists of words.txt, by seed. Knows nothing of tokenizers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_VERBS, _NOUNS, _ADJECTIVES = (part.split() for part in (Path(__file__).parent / "words.txt").read_text().split("\n\n"))

_FRAMES = (
    "I'll {v} the {a} {n} and then {v2} its {n2}.",
    "The {n} doesn't {v} because the {n2} is {a}.",
    "Please {v} the {n} in my {n2}, and let me know when it's {a}.",
    "Let me {v} the {n} before I {v2} the {a} {n2}.",
    "We've {ved} the {n}; the {a} {n2} is still {ving}.",
    "First, {v} the {n}. Second, {v2} every {a} {n2}.",
    "Can you {v} {num} {n}s for the {n2}?",
    "That's the {a} {n}: it {vs} the {n2} when the {n3} changes.",
    "Okay, the {n} was {ved}, so the next step is to {v2} the {n2}.",
    "It looks like {n} {num} has a {a} {n2}. I should {v} it.",
    "Sorry, I can't {v} a {n} without the {a} {n2}.",
    "Done. I {ved} {num} {n}s, {ving} the {n2} on the way.",
)

_CODE = tuple(
    sample + "\n"
    for sample in """
def {v}_{n}({n2}: str, {n3}: int = {num}) -> dict[str, Any]:
    if not {n2}:
        raise ValueError(f"{n2} is {a}")
    return {{"{n}": {n3}}}

class {N}{N2}:
    def __init__(self, {n3}: list[int]) -> None:
        self.{n3} = {n3}

    def {v}(self):
        return len(self.{n3})

for {n} in {n2}s:
    {n3} = {v}({n}, {a}=True)
    assert {n3} is not None, "{n3} must be {a}"

$ grep -rn "{v}_{n}" src/{n2}/
src/{n2}/{n3}.py:{num}:    {n} = self.{v}_{n}()

--- a/src/{n}.py
+++ b/src/{n}.py
@@ -{num},7 +{num},8 @@
-    return {n2}
+    return {v}({n2})

Traceback (most recent call last):
  File "/app/{n}/{n2}.py", line {num}, in {v}
    {n3}.{v2}()
TypeError: {v2}() missing 1 required argument
""".strip().split("\n\n")
)


def built_in_text(seed: int, num_samples: int = 6000) -> Iterator[str]:
    """Samples of every sort of text that an agent's prompt holds."""
    rng = random.Random(seed)
    makers = (_sentences, _sentences, _code, _schema, _call, _result)
    for _ in range(num_samples):
        yield rng.choice(makers)(rng)


def file_text(path: Path) -> Iterator[str]:
    """The lines of a file; of a JSONL file also every string in it, as it reads when it is not escaped."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield line + "\n"
        if path.suffix == ".jsonl" and line.strip():
            yield from _strings(json.loads(line))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)


def _words(rng: random.Random) -> dict[str, str]:
    verb, noun, noun2 = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_NOUNS)
    stem = verb.removesuffix("e")
    return {
        "v": verb,
        "v2": rng.choice(_VERBS),
        "vs": verb + "s",
        "ved": stem + "ed",
        "ving": stem + "ing",
        "n": noun,
        "n2": noun2,
        "n3": rng.choice(_NOUNS),
        "N": noun.capitalize(),
        "N2": noun2.capitalize(),
        "a": rng.choice(_ADJECTIVES),
        "num": str(rng.randrange(1, 2000)),
    }


def _sentences(rng: random.Random) -> str:
    text = " ".join(rng.choice(_FRAMES).format_map(_words(rng)) for _ in range(rng.randrange(1, 5)))
    return text + rng.choice(("\n", "\n\n", ""))


def _code(rng: random.Random) -> str:
    return rng.choice(_CODE).format_map(_words(rng))


def _schema(rng: random.Random) -> str:
    words = [_words(rng) for _ in range(rng.randrange(1, 4))]
    properties = {
        f"{word['n']}_{word['n2']}" if rng.random() < 0.5 else word["n"]: {
            "type": rng.choice(("string", "integer", "number", "boolean")),
            "description": f"The {word['a']} {word['n']} to {word['v']}.",
        }
        for word in words
    }
    function = {
        "name": f"{words[0]['v']}_{words[0]['n']}",
        "description": rng.choice(_FRAMES).format_map(words[0]),
        "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
    }
    return json.dumps({"type": "function", "function": function}) + "\n"


def _call(rng: random.Random) -> str:
    word = _words(rng)
    value = rng.choice((word["num"], word["n"], "true", "false", f"/src/{word['n']}/{word['n2']}.py", _code(rng)))
    return (
        f"<think>\n{_sentences(rng).strip()}\n</think>\n\n<tool_call>\n<function={word['v']}_{word['n']}>\n"
        f"<parameter={word['n2']}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )


def _result(rng: random.Random) -> str:
    value = {rng.choice(_NOUNS): rng.choice((rng.choice(_NOUNS), rng.randrange(1000), True, None)) for _ in range(rng.randrange(1, 5))}
    value["id"] = f"{rng.choice(_NOUNS)}_{rng.getrandbits(32):08x}"
    return f"<tool_response>\n{json.dumps(value)}\n</tool_response>\n"

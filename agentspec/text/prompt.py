"""Build prompt ids from messages: render, splice in the ids of generated turns, and find the token offsets of
breakpoints.

Owns the splice: the ids of a generated turn replace a stretch of the prompt only where the template renders exactly the
text that they decode to. The prompt therefore always reads as the template writes it. Knows nothing of the engine's
cache or of HTTP.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from agentspec.text import context_edits
from agentspec.text.chat_template import CacheMark, ChatTemplate, MessageMark, Tools
from agentspec.text.context_edits import AppliedEdit, ContextEdit
from agentspec.text.events import AssistantTurn
from agentspec.text.messages import Message, normalise
from agentspec.text.prompt_encoder import PromptEncoder, Stretch
from agentspec.text.segmenter import THINK_CLOSE, THINK_OPEN
from agentspec.text.sentinels import ANY_SENTINEL, Sentinels, refuse_surrogates
from agentspec.text.system_messages import Arranged
from agentspec.text.template_proof import proven
from agentspec.text.token_limit import COUNTED_CONTEXTS, TokenLimit
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import DIALECTS, Dialect, detect_dialect
from agentspec.text.tool_calls.protocol import CALL_OPEN
from agentspec.text.turn_memory import TurnMemory, TurnRecord, conversation_seed, extend_by_turn, extend_conversation
from agentspec.types import BY_PROTECTION, Breakpoint, CheckpointKind, tokens

_LEAD_CHARACTERS = 64
"""Enough for the generation prompt and the end of the message before it."""
_LONG_LEAD = 4096
"""The range that is searched for a sentinel when the last _LEAD_CHARACTERS have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPrompt:
    prompt_ids: array[int]
    """Must not be changed: they are cached for the next prompt of the conversation."""
    breakpoints: list[Breakpoint]
    """Ascending offsets into prompt_ids, each above 0."""
    marked_end: int
    """Tokens before the client's last mark; 0 when it set none."""
    reasoning_open: bool
    """Whether the prompt ends inside a think block, so that the answer begins with reasoning."""
    conversation: bytes
    """Key of the messages (text/turn_memory.py)."""
    namespace: str
    """The namespace in which the turn is stored."""
    begun: TurnRecord
    """The part of the turn that the prompt already contains; usually only its lead."""
    applied: tuple[AppliedEdit, ...] = ()
    """The context edits that changed something."""

    @property
    def is_mid_text(self) -> bool:
        """Whether the answer continues a text, so that a tag or whitespace at its start is not the start of a
        segment."""
        text = self.begun.turn.content.rstrip()
        return bool(text) and not (self.reasoning_open and text.endswith(THINK_OPEN))


class PromptAsk(msgspec.Struct, frozen=True):
    """The arguments of PromptBuilder.build."""

    messages: Sequence[Mapping[str, Any]]
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] | None = None
    limit: TokenLimit | None = None
    """Limit on the prompt's tokens."""
    namespace: str = ""
    """Only turns that were generated in the same namespace are spliced in."""
    marked: Sequence[CacheMark] = ()
    """The client's marks, which become breakpoints in addition to the template's own."""
    edits: Sequence[ContextEdit] = ()
    """Applied after turns are recognised, so that the conversation key depends on the client's messages and not on the
    edits."""
    continues: bool = False
    """Whether the answer continues the last message, an assistant message without calls."""
    begins: bool = True
    """Whether the prompt ends with the generation prompt. False: it ends after the messages, for counting tokens."""


class PromptBuilder:
    """Builds prompts for one model and records its turns. Not thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, memory: TurnMemory, *, trusts_client_text: bool = False
    ) -> None:
        """`trusts_client_text`: text in messages that spells an added token becomes that token, as in transformers.

        Raises CheckpointError for a template that requires `trusts_client_text`."""
        self._tokenizer = tokenizer
        self._template, self._sentinels = (template, Sentinels()) if trusts_client_text else proven(template, tokenizer)
        self._memory = memory
        self._encoder = PromptEncoder(tokenizer, self._sentinels)
        self._special_texts = tuple(map(self._sentinels.of, tokenizer.special_ids))
        tags = (THINK_OPEN, THINK_CLOSE, CALL_OPEN) if self._sentinels else ()
        self.tag_ids = {tag: token_id for tag in tags if (token_id := tokenizer.id_of(tag)) is not None}
        """Answer tags that are added tokens, and are recognised only as such: tag -> token id."""
        name = detect_dialect(template.source)
        self.dialect: Dialect | None = None if name is None else DIALECTS[name]
        """How the model writes tool calls; None when its template shows no known dialect."""
        self.template_reads = template.reads
        """Undeclared variables of the checkpoint's template."""
        self.num_spliced = 0
        """Number of returned turns whose generated ids were spliced in."""
        self.num_mismatched = 0
        """Number of returned turns that the template renders differently from the generated text (reasoning dropped,
        whitespace trimmed). The rendered text is used for them."""

    def build(self, asked: PromptAsk) -> BuiltPrompt:
        """Build the prompt for the next assistant turn.

        Raises RequestError naming the invalid field, and ContextLengthError for too many tokens. Nothing is cached of a
        prompt that is refused."""
        tools, template_kwargs, limit, continues = asked.tools, asked.template_kwargs, asked.limit, asked.continues
        refuse_surrogates(tools, "tools")
        refuse_surrogates(template_kwargs, "chat_template_kwargs")
        arranged = Arranged.of(normalise(asked.messages), self._template.system_places)
        marked = [
            MessageMark(*arranged.move_mark(mark.message, mark.characters)) if isinstance(mark, MessageMark) else mark
            for mark in asked.marked
        ]
        recalled, records, keys = self._recall(arranged.messages, asked.namespace)
        if continues:
            keys.pop()  # the last message is part of the new turn, so the conversation ends before it
        render = partial(
            self._template.render,
            tools=tools,
            add_generation_prompt=asked.begins,
            template_kwargs=template_kwargs,
            continues=continues,
        )

        # Before the edits the prompt may exceed the context: clearing makes room.
        counted = None if limit is None else replace(limit, times=COUNTED_CONTEXTS)

        def count(edited: Sequence[Message]) -> int:
            text = render(edited).text
            return len(self._encoder.encode(text, self._locate(text, records), limit=counted).ids)

        conversation, applied = context_edits.apply(recalled, asked.edits, count)
        rendered = render(conversation, marked=marked)
        if limit is not None:
            limit.check_text(rendered.text, self._tokenizer.bounds)
        characters = [offset for offset, _ in rendered.marks]
        stretches = self._locate(rendered.text, records)
        encoded = self._encoder.encode(rendered.text, stretches, keys, limit)
        self._template.cache_system_block(rendered)
        self.num_spliced += len(stretches)
        self.num_mismatched += len(records) - len(stretches)
        offsets = [self._encoder.token_offset(encoded, offset) for offset in characters]
        kinds = [kind for _, kind in rendered.marks]
        return BuiltPrompt(
            prompt_ids=encoded.ids,
            breakpoints=_breakpoints(offsets, kinds),
            marked_end=dict(zip(characters, offsets, strict=True)).get(rendered.marked_end, 0),
            reasoning_open=_opens_reasoning(recalled[-1])
            if continues
            else rendered.text.rstrip().endswith(self._sentinels.of(THINK_OPEN)),
            conversation=keys[-1],
            namespace=asked.namespace,
            begun=self._begun(rendered.text, recalled[-1] if continues else None, stretches, records),
            applied=applied,
        )

    def remember(
        self,
        prompt: BuiltPrompt,
        turn: AssistantTurn,
        token_ids: Sequence[int],
        *,
        is_cut: bool,
        skip_special_tokens: bool = True,
    ) -> None:
        """Record a finished turn, to recognise it when the client sends it back.

        `turn`: the segmenter's result. `token_ids`: all generated ids, with or without a stop id. `is_cut`: the turn
        did not end with the model's own stop id. `skip_special_tokens`: the text of the turn has no control tokens."""
        ids = tokens(token_ids)
        if ids and not self._tokenizer.token_bytes[ids[-1]]:
            ids.pop()
        if not ids:
            return
        begun = prompt.begun
        ids = begun.token_ids + ids
        turn = replace(turn, reasoning=begun.turn.reasoning + turn.reasoning, content=begun.turn.content + turn.content)
        text = self._sentinels.decode(ids, self._tokenizer.shown_bytes(skip_special_tokens=skip_special_tokens))
        texts = (text, turn.reasoning, turn.content, *(call.arguments for call in turn.shown_calls))
        quotes_tags = any(self._sentinels.write(part) != part for part in texts)
        record = TurnRecord(turn, ids, text, begun.lead, is_cut, prompt.namespace, quotes_tags)
        self._memory.add_turn(extend_by_turn(prompt.conversation, turn), record)

    def _recall(
        self, conversation: list[Message], namespace: str
    ) -> tuple[list[Message], list[TurnRecord], list[bytes]]:
        """Return the conversation as it was generated, the records of its turns, and its keys: the empty
        conversation's, and one after each message."""
        key = conversation_seed(namespace)
        keys = [key]
        restored: list[Message] = []
        records: list[TurnRecord] = []
        for message in conversation:
            key = extend_conversation(key, message)
            keys.append(key)
            record = self._memory.find_turn(key, message, namespace) if message["role"] == "assistant" else None
            if record is not None:
                message = record.restore(
                    message, arguments_as_written=self.dialect is not None and self.dialect.keeps_argument_text
                )
                records.append(record)
            restored.append(message)
        return restored, records, keys

    def _locate(self, text: str, records: Sequence[TurnRecord]) -> list[Stretch]:
        """Find the recorded turns in the rendered text, in order."""
        stretches: list[Stretch] = []
        cursor = 0
        for record in records:
            place = self._place(text, record, cursor)
            if place is not None:
                stretches.append(Stretch(*place, record.token_ids))
                cursor = place[1]
        return stretches

    def _place(self, text: str, record: TurnRecord, cursor: int) -> tuple[int, int] | None:
        """Find the start and end of one turn at or after `cursor`; None when the template rendered it differently.

        A turn may quote a tag as an added token, which returns as text, or spell in text what the template renders as a
        tag. Behind a lead that contains a sentinel, which no client can write, the spelled text is compared."""
        lead = record.lead
        first = max(0, cursor - len(lead))
        start = text.find(lead + record.text, first) + len(lead)
        if start >= len(lead) and self._is_end(text, record, start + len(record.text)):
            return start, start + len(record.text)
        found = text.find(lead, first) if record.quotes_tags and ANY_SENTINEL.search(lead) else -1
        spelled = "" if found < 0 else self._sentinels.spell(record.text)
        while found >= 0:
            start = found + len(lead)
            end = self._sentinels.end_of(spelled, text, start)
            if end is not None and self._is_end(text, record, end):
                return start, end
            found = text.find(lead, found + 1)
        return None

    def _is_end(self, text: str, record: TurnRecord, end: int) -> bool:
        return record.is_cut or end == len(text) or text.startswith(self._special_texts, end)

    def _begun(
        self, text: str, message: Message | None, stretches: Sequence[Stretch], records: Sequence[TurnRecord]
    ) -> TurnRecord:
        """Return a record of the part of the next turn that the prompt already contains: `message`, if there is one.

        A message that was generated here keeps its ids, so that the whole turn has them. Text that the client wrote is
        tokenised again each time."""
        if (
            message is not None
            and stretches
            and stretches[-1].end == len(text)
            and stretches[-1].token_ids is records[-1].token_ids
        ):
            return records[-1]
        lead = text[-_LEAD_CHARACTERS:]
        if not ANY_SENTINEL.search(lead):  # without a sentinel, client text could imitate the lead
            anchors = [found.start() for found in ANY_SENTINEL.finditer(text, max(0, len(text) - _LONG_LEAD))]
            lead = text[anchors[-1] :] if anchors else lead
        said = (
            AssistantTurn()
            if message is None
            else AssistantTurn(reasoning=message.get("reasoning_content", ""), content=message.get("content", ""))
        )
        return TurnRecord(said, tokens(), "", lead, is_cut=True)


def _opens_reasoning(message: Message) -> bool:
    """Whether the message to continue is an unfinished think block. A think tag at any other place is plain text."""
    text = message.get("content", "")
    return text.lstrip().startswith(THINK_OPEN) and THINK_CLOSE not in text


def _breakpoints(offsets: Sequence[int], kinds: Sequence[CheckpointKind]) -> list[Breakpoint]:
    """Return one breakpoint per offset; of several kinds at one offset, the best protected one."""
    kind_at: dict[int, CheckpointKind] = {}
    for offset, kind in zip(offsets, kinds, strict=True):
        if offset > 0:
            kind_at[offset] = max(kind, kind_at.get(offset, kind), key=BY_PROTECTION.index)
    return [Breakpoint(offset, kind) for offset, kind in kind_at.items()]

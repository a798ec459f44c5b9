"""Messages to prompt ids: render, put the ids of generated turns back in their places, and find the breakpoints'
tokens.

Owns the splice. A generated turn's ids replace a stretch of the prompt only where the template renders the very text
that they decode to; so the prompt always reads as the template says. Knows nothing of the engine's cache or of HTTP.
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
"""Enough to hold the generation prompt and the end of the message before it."""
_LONG_LEAD = 4096
"""Characters among which a sentinel is sought, where those above have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPrompt:
    prompt_ids: array[int]
    """Not to be changed: the next prompt of the conversation begins with them."""
    breakpoints: list[Breakpoint]
    """Ascending offsets into prompt_ids, each above 0."""
    marked_end: int
    """Tokens before the client's last mark; 0 when it set none."""
    reasoning_open: bool
    """The prompt ends inside a think block, so the answer begins with reasoning."""
    conversation: bytes
    """Key of the messages (text/turn_memory.py)."""
    namespace: str
    """Where the turn will be found again."""
    begun: TurnRecord
    """What stands of the generated turn before it is generated; mostly nothing but its lead."""
    applied: tuple[AppliedEdit, ...] = ()
    """What of the asked edits changed something."""

    @property
    def is_mid_text(self) -> bool:
        """The answer goes on in the middle of a text, so what opens a text or a think block at an answer's beginning is
        neither here."""
        text = self.begun.turn.content.rstrip()
        return bool(text) and not (self.reasoning_open and text.endswith(THINK_OPEN))


class PromptAsk(msgspec.Struct, frozen=True):
    """What a prompt is built of."""

    messages: Sequence[Mapping[str, Any]]
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] | None = None
    limit: TokenLimit | None = None
    """Of its tokens."""
    namespace: str = ""
    """Turns generated in another one are not put back."""
    marked: Sequence[CacheMark] = ()
    """Places that become breakpoints beside the template's own."""
    edits: Sequence[ContextEdit] = ()
    """Made after turns were recognised, so that the conversation is known by what the client sends, whatever the model
    is shown of it."""
    continues: bool = False
    """The last message is the beginning of the turn, an assistant's without calls."""
    begins: bool = True
    """The prompt ends with what opens the turn; false: behind the messages, for those who only count."""


class PromptBuilder:
    """Builds prompts for one model and remembers its turns. Not thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, memory: TurnMemory, *, trusts_client_text: bool = False
    ) -> None:
        """`trusts_client_text`: text in messages that spells an added token is that token, as in transformers.

        Raises CheckpointError for a template that needs that."""
        self._tokenizer = tokenizer
        self._template, self._sentinels = (template, Sentinels()) if trusts_client_text else proven(template, tokenizer)
        self._memory = memory
        self._encoder = PromptEncoder(tokenizer, self._sentinels)
        self._special_texts = tuple(map(self._sentinels.of, tokenizer.special_ids))
        tags = (THINK_OPEN, THINK_CLOSE, CALL_OPEN) if self._sentinels else ()
        self.tag_ids = {tag: token_id for tag in tags if (token_id := tokenizer.id_of(tag)) is not None}
        """Tags of answers that are tokens, and count only as such."""
        name = detect_dialect(template.source)
        self.dialect: Dialect | None = None if name is None else DIALECTS[name]
        """How this model writes tool calls; None when its template teaches no dialect that we know."""
        self.template_reads = template.reads
        """Variables that the checkpoint's template takes, beside those that every template may."""
        self.num_spliced = 0
        """Returned turns whose ids were put back."""
        self.num_mismatched = 0
        """Returned turns that the template renders otherwise than they were generated (dropped reasoning, trimmed
        whitespace): rendered text won."""

    def build(self, asked: PromptAsk) -> BuiltPrompt:
        """The prompt that asks for the next assistant turn.

        Raises RequestError naming what can't be used, and ContextLengthError for too many tokens; nothing is remembered
        of such a prompt."""
        tools, template_kwargs, limit, continues = asked.tools, asked.template_kwargs, asked.limit, asked.continues
        refuse_surrogates(tools, "tools")
        refuse_surrogates(template_kwargs, "chat_template_kwargs")
        arranged = Arranged.of(normalise(asked.messages), self._template.system_places)
        marked = [
            MessageMark(*arranged.mark(mark.message, mark.characters)) if isinstance(mark, MessageMark) else mark
            for mark in asked.marked
        ]
        recalled, records, keys = self._recall(arranged.messages, asked.namespace)
        if continues:
            keys.pop()  # the turn is not whole: the conversation is the one before it
        render = partial(
            self._template.render,
            tools=tools,
            add_generation_prompt=asked.begins,
            template_kwargs=template_kwargs,
            continues=continues,
        )

        counted = (
            None if limit is None else replace(limit, times=COUNTED_CONTEXTS)
        )  # what is cleared makes room for the rest

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
        self._template.remember(rendered)
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
        """Keep a finished turn for when the client sends it back. `turn` is the segmenter's, `token_ids` all that was
        generated, stop id or not; `is_cut`: it was not ended by the model's own stop id. `skip_special_tokens`: the
        turn's text has no control tokens."""
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
        self._memory.remember(extend_by_turn(prompt.conversation, turn), record)

    def _recall(
        self, conversation: list[Message], namespace: str
    ) -> tuple[list[Message], list[TurnRecord], list[bytes]]:
        """The conversation as it was generated, the records of its turns, and its keys: before the first message, and
        behind each."""
        key = conversation_seed(namespace)
        keys = [key]
        restored: list[Message] = []
        records: list[TurnRecord] = []
        for message in conversation:
            key = extend_conversation(key, message)
            keys.append(key)
            record = self._memory.find(key, message, namespace) if message["role"] == "assistant" else None
            if record is not None:
                message = record.restore(
                    message, arguments_as_written=self.dialect is not None and self.dialect.keeps_argument_text
                )
                records.append(record)
            restored.append(message)
        return restored, records, keys

    def _locate(self, text: str, records: Sequence[TurnRecord]) -> list[Stretch]:
        """Where the turns stand in the rendered text, in order."""
        stretches: list[Stretch] = []
        cursor = 0
        for record in records:
            place = self._place(text, record, cursor)
            if place is not None:
                stretches.append(Stretch(*place, record.token_ids))
                cursor = place[1]
        return stretches

    def _place(self, text: str, record: TurnRecord, cursor: int) -> tuple[int, int] | None:
        """Where one turn begins and ends, not before `cursor`; None where the template wrote something else.

        A turn may quote tags as added tokens, which come back as text, or spell as text what the template writes as
        tags: behind a lead that is the template's own it is known by what it reads."""
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
        """What stands of the next turn at the end of a prompt's text: `message`, if there is one.

        It keeps the ids that it was generated as, so that the whole turn has them; what the client wrote is tokenised
        the same each time."""
        if (
            message is not None
            and stretches
            and stretches[-1].end == len(text)
            and stretches[-1].token_ids is records[-1].token_ids
        ):
            return records[-1]
        lead = text[-_LEAD_CHARACTERS:]
        if not ANY_SENTINEL.search(lead):  # a client could write the same
            anchors = [found.start() for found in ANY_SENTINEL.finditer(text, max(0, len(text) - _LONG_LEAD))]
            lead = text[anchors[-1] :] if anchors else lead
        said = (
            AssistantTurn()
            if message is None
            else AssistantTurn(reasoning=message.get("reasoning_content", ""), content=message.get("content", ""))
        )
        return TurnRecord(said, tokens(), "", lead, is_cut=True)


def _opens_reasoning(message: Message) -> bool:
    """The text that the answer goes on from is a think block without its end. A tag that stands elsewhere in it is text
    like any other."""
    text = message.get("content", "")
    return text.lstrip().startswith(THINK_OPEN) and THINK_CLOSE not in text


def _breakpoints(offsets: Sequence[int], kinds: Sequence[CheckpointKind]) -> list[Breakpoint]:
    """One breakpoint an offset; of several kinds at one offset the best protected stands."""
    kind_at: dict[int, CheckpointKind] = {}
    for offset, kind in zip(offsets, kinds, strict=True):
        if offset > 0:
            kind_at[offset] = max(kind, kind_at.get(offset, kind), key=BY_PROTECTION.index)
    return [Breakpoint(offset, kind) for offset, kind in kind_at.items()]

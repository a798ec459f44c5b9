"""Stored answers of /v1/responses, in memory. Each belongs to one owner; the size limits are shared. Eviction takes the
least recently used response of the owner who stores most.

A response continues the one before it, so a conversation is a chain of records. Using a record also uses all records
before it. So eviction takes the end of the least recently used chain, and a record never loses its predecessors, unless
they are deleted. Knows records as JSON text; nothing of HTTP or prompts. Belongs to one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

_ENTRY_OVERHEAD_BYTES = 1000
_ITEM_OVERHEAD_BYTES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResponse:
    response: bytes
    """The response object, as JSON."""
    input_items: bytes
    """The items that its request added, as JSON."""
    item_ids: tuple[str, ...] = ()
    """Ids, without duplicates, of its items that can be referenced, including those of the output."""
    previous_id: str | None
    """The response that it continues."""
    session_id: str | None

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the record."""
        return (
            _ENTRY_OVERHEAD_BYTES
            + len(self.response)
            + len(self.input_items)
            + _ITEM_OVERHEAD_BYTES * len(self.item_ids)
        )


class ResponseStore:
    """The stored responses of one owner."""

    def __init__(
        self,
        *,
        max_bytes: int = 256 << 20,
        max_responses: int = 16384,
        stores: dict[str, ResponseStore] | None = None,
        owner: str = "",
    ) -> None:
        """max_bytes, max_responses: limits over all owners. stores: the stores by owner; this one is added."""
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._stores: dict[str, ResponseStore] = {} if stores is None else stores
        self._stores[owner] = self
        self._num_bytes = 0
        self._records: OrderedDict[str, StoredResponse] = OrderedDict()
        self._holders: dict[str, list[str]] = {}
        """For each item, the ids of the responses that contain it, the oldest first."""

    def of(self, owner: str) -> ResponseStore:
        """Another owner's store, under the same limits. Neither store sees the other's records."""
        if owner not in self._stores:
            ResponseStore(
                max_bytes=self._max_bytes, max_responses=self._max_responses, stores=self._stores, owner=owner
            )
        return self._stores[owner]

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, response_id: str) -> bool:
        """Whether it is stored. Does not count as a use."""
        return response_id in self._records

    @property
    def num_bytes(self) -> int:
        """Approximate memory of all records; never above max_bytes."""
        return self._num_bytes

    def put(self, response_id: str, record: StoredResponse) -> None:
        """Store a record under a new id, evicting others as needed. A record over the limit by itself is dropped at
        once."""
        self._records[response_id] = record
        self._num_bytes += record.num_bytes
        for item_id in record.item_ids:
            self._holders.setdefault(item_id, []).append(response_id)
        self._touch(response_id)
        stores = self._stores.values()
        while sum(store.num_bytes for store in stores) > self._max_bytes:
            max(stores, key=lambda store: store.num_bytes)._drop_oldest()
        while sum(map(len, stores)) > self._max_responses:
            max(stores, key=len)._drop_oldest()

    def get(self, response_id: str) -> StoredResponse | None:
        self._touch(response_id)
        return self._records.get(response_id)

    def holder(self, item_id: str) -> StoredResponse | None:
        """The oldest record that contains this item."""
        names = self._holders.get(item_id)
        return self.get(names[0]) if names else None

    def conversation(self, response_id: str) -> list[StoredResponse] | None:
        """The record and all its predecessors, oldest first; None if one of them is missing."""
        records = [self._records[name] for name in self._chain(response_id)]
        if not records or records[-1].previous_id is not None:
            return None
        self._touch(response_id)
        return records[::-1]

    def delete(self, response_id: str) -> bool:
        """Delete a record; return whether it existed. Its successors can still be read, but not continued."""
        record = self._records.pop(response_id, None)
        if record is not None:
            self._num_bytes -= record.num_bytes
            for item_id in record.item_ids:
                self._holders[item_id].remove(response_id)
                if not self._holders[item_id]:
                    del self._holders[item_id]
        return record is not None

    def _drop_oldest(self) -> None:
        self.delete(next(iter(self._records)))

    def _chain(self, response_id: str) -> Iterator[str]:
        """The ids from a record back to the first one, or to the first missing one."""
        name: str | None = response_id
        while name is not None and name in self._records:
            yield name
            name = self._records[name].previous_id

    def _touch(self, response_id: str) -> None:
        for name in list(self._chain(response_id)):
            self._records.move_to_end(name)

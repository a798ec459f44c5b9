"""A queue that is fair by flow: owners take turns, and so do the flows of an owner. Not thread-safe."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from agentspec.runtime.request import Flow

_Item = TypeVar("_Item")


class FairQueue(Generic[_Item]):
    """Of a flow's items the first comes first."""

    def __init__(self, limit: int) -> None:
        """limit: of items. One more pushes out the last one of whoever has the most."""
        self._limit = limit
        self._owners: OrderedDict[str, OrderedDict[str, deque[_Item]]] = OrderedDict()
        """Whose turn it is stands first."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, flow: Flow, item: _Item) -> _Item | None:
        """Returns what there is no room for any more: an item of the longest flow of the owner who has the most, this one if that is so."""
        owner, name = flow
        self._owners.setdefault(owner, OrderedDict()).setdefault(name, deque()).append(item)
        self._size += 1
        if self._size <= self._limit:
            return None
        most = max(self._owners, key=lambda key: (sum(map(len, self._owners[key].values())), key == owner))
        longest = max(self._owners[most], key=lambda key: (len(self._owners[most][key]), key == name))
        return self._pop((most, longest), -1)

    def take(self) -> _Item | None:
        """The next item; None when there is none."""
        if not self._owners:
            return None
        owner = next(iter(self._owners))
        name = next(iter(self._owners[owner]))
        self._owners.move_to_end(owner)
        self._owners[owner].move_to_end(name)
        return self._pop((owner, name), 0)

    def _pop(self, flow: Flow, place: int) -> _Item:
        owner, name = flow
        items = self._owners[owner][name]
        item = items[place]
        del items[place]
        self._size -= 1
        if not items:
            del self._owners[owner][name]
            if not self._owners[owner]:
                del self._owners[owner]
        return item

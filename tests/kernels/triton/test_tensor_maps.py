"""Maps of TMA copies that read 256 bytes at a time: only those that are asked for, and only if they are as expected."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from agentspec.kernels.triton import tensor_maps

FIELD = tensor_maps._Field(at=10, bits=0b110, value=0b100, address_at=0)


class Map:
    """A map as a driver might write it."""

    def __init__(self, address: int, promotion: int) -> None:
        self.memory = (ctypes.c_uint8 * 128)()
        self.memory[:8] = list(address.to_bytes(8, "little"))
        self.memory[FIELD.at] = 0b1000 | promotion


class Utils:
    """Triton's of one version: its function's name and the promotion that it writes."""

    def __init__(self, name: str, promotion: int = FIELD.value, offset: int = 0) -> None:
        setattr(self, name, lambda address, *_: Map(address + offset, promotion))


def install(monkeypatch: pytest.MonkeyPatch, utils: object) -> bool:
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils) if utils is not None else SimpleNamespace())
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(tensor_maps, "_field", lambda: FIELD)
    monkeypatch.setattr(tensor_maps, "_memory", lambda tensor_map: tensor_map.memory)
    return tensor_maps._install.__wrapped__()


@pytest.mark.parametrize("name", ["fill_tma_descriptor", "fill_tma_descriptor_tiled"])
def test_only_maps_of_marked_memory_are_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    utils: Any = Utils(name)
    assert install(monkeypatch, utils)
    fill = getattr(utils, name)
    for address, read in ((4096, 128), (tensor_maps._Address(4096), 256)):
        tensor_map = fill(address, 3, 1)
        assert tensor_maps.promotion_of(tensor_map, 4096) == read
        # Nothing else of the map.
        assert tensor_map.memory[FIELD.at] & ~FIELD.bits == 0b1000
        assert bytes(tensor_map.memory[11:]) == bytes(117)


def test_a_map_that_is_not_as_expected_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for promotion, offset in ((0b110, 0), (FIELD.value, 8)):
        utils: Any = Utils("fill_tma_descriptor", promotion, offset)
        assert install(monkeypatch, utils)
        tensor_map = utils.fill_tma_descriptor(tensor_maps._Address(4096))
        assert tensor_map.memory[FIELD.at] == 0b1000 | promotion
        assert tensor_maps.promotion_of(tensor_map, 4096) == 0


@pytest.mark.parametrize("utils", [None, Utils("fill_something_else")])
def test_without_tritons_function_descriptors_stay_as_they_are(utils: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that compiles for a GPU that it does not have."""
    assert not install(monkeypatch, utils)
    monkeypatch.setattr(tensor_maps, "_install", lambda: False)
    descriptor: Any = SimpleNamespace(base=torch.zeros(4))
    assert tensor_maps.reads_256_bytes(descriptor).base is descriptor.base
    monkeypatch.setattr(tensor_maps, "_install", lambda: True)
    before = descriptor.base
    base = tensor_maps.reads_256_bytes(descriptor).base
    assert isinstance(base.data_ptr(), tensor_maps._Address)
    assert (base.data_ptr(), base.dtype) == (before.data_ptr(), torch.float32)

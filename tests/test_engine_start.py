"""The entry of the engine's process: what it leaves out of `import torch` is there for whoever asks, a version of torch
that needs it at once still starts, and opening the GPU early can't fail a start."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.config import EngineConfig
from agentspec.engine import start
from agentspec.engine.remote import RemoteEngine, engine_options
from agentspec.types import SamplingParams
from agentspec.wire import FinishEvent, Submit, TokensEvent

CONFIG = EngineConfig(memory_gib=0.2, device="cpu", max_running=3, max_context=512)


def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


async def tokens_of_a_start(config: EngineConfig = CONFIG) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found: list[int] = []
    async with await RemoteEngine.start(config) as engine:
        async for event in engine.stream(Submit(request_id="a", prompt_ids=[5, 6, 7], sampling=sampling)):
            if isinstance(event, TokensEvent):
                found.extend(event.token_ids)
            assert not isinstance(event, FinishEvent) or event.error is None
    return found


def test_deferred_modules_are_imported_by_whoever_needs_them() -> None:
    said = output_of("""
import sys
from agentspec.engine.start import DEFERRED, import_with_deferred
torch = import_with_deferred("torch")
print(*[name in sys.modules for name in DEFERRED], hasattr(torch, "_meta_registrations"))
import torch._meta_registrations, torch.distributed._meta_registrations
print(torch._meta_registrations.meta_index_Tensor.__name__, torch.distributed._meta_registrations.__file__ is not None)
""")
    assert said.splitlines() == ["False False False", "meta_index_Tensor True"]


def test_an_engine_of_random_weights_starts() -> None:
    """torch 2.13 makes a deferred module a part of its generators of random numbers."""
    assert len(asyncio.run(tokens_of_a_start(replace(CONFIG, random_weights=True)))) == 6


def test_torch_that_is_imported_already_stays_as_it_is() -> None:
    said = output_of("""
import torch
from agentspec.engine.start import import_with_deferred
before = torch._meta_registrations
print(import_with_deferred("torch") is torch, torch._meta_registrations is before)
""")
    assert said == "True True\n"


def test_what_an_engine_says_of_memory_needs_no_deferred_module() -> None:
    """A start that lacks memory computes what would fit on tensors without memory."""
    ask = "{}('agentspec.commands.memory').run(__import__('agentspec').EngineConfig(), [24.0], 512)"
    usual = output_of("from importlib import import_module\n" + ask.format("import_module"))
    quick = output_of("from agentspec.engine.start import import_with_deferred\n" + ask.format("import_with_deferred"))
    assert quick == usual
    assert "24 GiB" in quick


def test_an_engine_knows_the_bytes_of_weights_without_a_deferred_module() -> None:
    said = output_of("""
import sys
from agentspec.engine.start import DEFERRED, import_with_deferred
outline = import_with_deferred("agentspec.models.outline")
import torch
from benchmarks.published import CONFIGS
for name, config in CONFIGS.items():
    print(name, outline.weight_bytes(config, dtype=torch.bfloat16) > 10**9)
print(*[name in sys.modules for name in DEFERRED])
""")
    *models, deferred = said.splitlines()
    assert len(models) >= 4
    assert all(line.endswith(" True") for line in models)
    assert deferred == "False False"


def test_a_torch_that_needs_the_deferred_modules_starts_with_all_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = asyncio.run(tokens_of_a_start())
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys
class Needs:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "torch._meta_registrations" in sys.modules:
            raise AttributeError("a stand-in lacks what this version needs")
        if name == "torch" and "agentspec.engine.start" in sys.orig_argv:
            open(LOG, "a").write(sys.orig_argv[-1])
        return None
LOG = LOG_PATH
sys.meta_path.insert(0, Needs())
""".replace("LOG_PATH", repr(str(tmp_path / "log")))
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert asyncio.run(tokens_of_a_start()) == expected
    assert (tmp_path / "log").read_text() == start.ALL_IMPORTS


def test_only_an_engine_that_may_use_a_gpu_opens_it() -> None:
    assert engine_options(EngineConfig(device="cpu")) == ()
    assert (
        engine_options(EngineConfig(device="auto"))
        == engine_options(EngineConfig(device="cuda"))
        == (start.OPEN_DEVICE,)
    )


class Driver:
    """Of a machine with one GPU. Each call but `failing` succeeds."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return 100 if name == self._failing else 0

        return call


@pytest.mark.parametrize(
    ("failing", "calls"),
    [
        ("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ("cuInit", ["cuInit"]),
        ("cuDeviceGet", ["cuInit", "cuDeviceGet"]),
        ("cuDevicePrimaryCtxRetain", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
    ],
)
def test_opening_the_device_stops_at_the_first_call_that_fails(
    failing: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    start.open_device()
    assert driver.calls == calls
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER", "the user's own choice stays"


def test_opening_the_device_without_a_driver_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    start.open_device()

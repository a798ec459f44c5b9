"""A start with an empty cache compiles nothing in the engine's own process, and neither do the first requests; a
second start runs no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

START = """
import json
from triton import knobs
late, stages = [], set()
def listen(**compiled):
    if not compiled["cache_hit"]:
        late.append(compiled["src"].name)
knobs.compilation.listener = listen
from agentspec.engine.assembly import assemble
from agentspec.config import EngineConfig
from agentspec.runtime.request import new_request
from agentspec.types import SamplingParams
from agentspec.wire import Submit
config = EngineConfig(max_running=2, draft_tokens=1, memory_gib=1)
parts = assemble(config, lambda stage, done, total: stages.add(stage))
for number, length in enumerate((300, 1500)):
    sampling = SamplingParams(temperature=number * 0.6, max_tokens=4, ignore_eos=True)
    submit = Submit(request_id=str(number), prompt_ids=[7 + index % 1000 for index in range(length)], sampling=sampling)
    limits = dict(spec=parts.spec, max_length=parts.memory.max_length)
    parts.loop.submit(new_request(submit, number=number, **limits, engine_seed=0, token_bytes=None))
for _ in range(30):
    parts.loop.run_once()
parts.close()
print(json.dumps([late, "compiling kernels" in stages, "listing kernels" in stages]))
"""


def test_kernels_are_compiled_before_first_launch(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    first, second = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(2)
    )
    assert first == [[], True, True]
    assert second == [[], False, False]

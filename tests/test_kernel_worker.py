"""The process that lists kernels: it does without torch's compiler."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch
from agentspec.engine.kernel_worker import stand_in_for_dynamo

def loaded():
    return any(name.startswith("torch._dynamo.") for name in sys.modules)

stand_in_for_dynamo()
x = torch.empty(3, 4, device="meta")
x.addmm_(x[:, :3], x)
torch.cat([x, x]).softmax(0).argmax(-1)
assert not loaded(), "operators without memory imported torch's compiler"

compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
assert loaded()
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.config.cache_size_limit
stand_in_for_dynamo()
assert torch._dynamo.config.cache_size_limit, "the real one was replaced"
"""


def test_operators_without_memory_leave_the_compiler_out_and_it_still_works() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

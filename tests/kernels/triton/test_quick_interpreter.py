"""What quick_interpreter.py removes from Triton's interpreter changes no bit of a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from agentspec.kernels.triton.launch import INTERPRETED
from tests.kernels.triton import interpreter_plans
from tests.kernels.triton.interpreter_plans import planned_operation

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")

F32, I32 = tl.float32, tl.int32
BUILDER: Any = interpreter.interpreter_builder
CONVERT: Any = interpreter._convert_float  # the fixtures that replace it have not run yet


OPERATIONS = {name: getattr(owner, name) for owner in (tl, tl.tensor) for name in dir(owner)}
"""As Triton has them. The interpreter replaces them during a launch."""


@pytest.fixture(autouse=True)
def _launched() -> Iterator[None]:
    """triton.language as it is during a launch."""
    scope = interpreter._patch_lang(both)
    yield
    scope.restore()


def tensor(data: Any, dtype: Any = F32) -> Any:
    values = np.array(data)
    return tl.tensor(
        TensorHandle(values, dtype), dtype if values.shape == (1,) else tl.block_type(dtype, list(values.shape))
    )


def bits(x: Any) -> Any:
    return (x.type.name, x.handle.dtype.name, x.handle.data.dtype, x.handle.data.shape, x.handle.data.tobytes())


def floats(*shape: int, seed: int = 0) -> Any:
    return tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def ints(*shape: int, seed: int = 0, dtype: Any = I32) -> Any:
    return tensor(np.random.default_rng(seed).integers(1, 99, shape).astype(np.int32), dtype)


def both(name: str, *turns: tuple[Any, ...], **kwargs: Any) -> None:
    """An operation on operands of one kind, as planned by the first turn and as Triton has it."""
    member = OPERATIONS[name]
    planned = planned_operation(member, BUILDER)
    with np.errstate(all="ignore"):
        for args in turns:
            wanted = member(*args, **kwargs, _semantic=TritonSemantic(BUILDER))
            found = planned(*args, **kwargs)
            assert type(found) is type(wanted)
            pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
            for x, y in pairs:
                assert bits(x) == bits(y)
                assert (x.shape, x.numel, x.dtype) == (y.shape, y.numel, y.dtype)


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        (name, left, right)
        for name in ("__add__", "__sub__", "__mul__", "__truediv__", "__lt__", "__ge__", "__eq__")
        for left, right in [
            (lambda s: floats(4, 8, seed=s), lambda s: floats(4, 8, seed=s + 9)),
            (lambda s: floats(4, 1, seed=s), lambda s: floats(1, 8, seed=s + 9)),
            (lambda s: floats(4, 8, seed=s), lambda s: floats(1, seed=s + 9)),
            (lambda s: ints(1, seed=s), lambda s: floats(8, seed=s)),
            (lambda s: ints(4, 8, seed=s), lambda s: ints(8, seed=s + 9)),
            (lambda s: ints(4, 8, seed=s), lambda s: s + 1),
            (lambda s: floats(4, seed=s), lambda s: -0.5),
        ]
    ],
)
def test_binary_operations_are_the_same(name: str, left: Any, right: Any) -> None:
    both(name, *[(left(seed), right(seed)) for seed in range(3)])


@pytest.mark.parametrize(
    "name", ["__floordiv__", "__mod__", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__"]
)
def test_integer_operations_are_the_same(name: str) -> None:
    both(name, *[(ints(4, 1, seed=seed), ints(1, 8, seed=seed + 9)) for seed in range(3)])
    if name in ("__and__", "__or__", "__xor__"):
        sides = [[[True, False, True, False], [True, True, False, False]], [[False] * 4, [True] * 4]]
        both(name, *[(tensor(x, tl.int1), tensor(y, tl.int1)) for x, y in sides])


@pytest.mark.parametrize("dtype", [tl.int64, tl.int8, tl.float16, tl.bfloat16, tl.float64, tl.int1, tl.float32])
def test_casts_are_the_same(dtype: Any) -> None:
    both("cast", *[(floats(4, 8, seed=seed), dtype) for seed in range(3)])
    both("cast", *[(ints(4, 8, seed=seed), dtype) for seed in range(3)])


def test_shapes_and_choices_are_the_same() -> None:
    turns = range(3)
    both("__getitem__", *[(floats(4, 8, seed=s), (slice(None), None, slice(None))) for s in turns])
    both("broadcast_to", *[(floats(4, 1, seed=s), (4, 8)) for s in turns])
    both("reshape", *[(floats(4, 8, seed=s), (2, 16)) for s in turns])
    both("permute", *[(floats(4, 8, seed=s), (1, 0)) for s in turns])
    both("join", *[(floats(4, 8, seed=s), floats(4, 8, seed=s + 9)) for s in turns])
    both("split", *[(floats(4, 2, seed=s),) for s in turns])
    both("full", *[((4, 8), 1.5, F32)] * 2)
    both("arange", *[(0, 16)] * 2)
    both("exp", *[(floats(4, 8, seed=s),) for s in turns])
    both("maximum", *[(floats(4, 1, seed=s), floats(1, 8, seed=s + 9)) for s in turns])
    both("dot", *[(floats(16, 16, seed=s), floats(16, 16, seed=s + 9)) for s in turns])
    conditions = [tensor(np.arange(8) % (s + 2) == 0, tl.int1) for s in turns]
    both("where", *[(condition, floats(8, seed=s), 0.0) for s, condition in enumerate(conditions)])


def test_a_plan_of_an_operand_taken_twice_is_right_for_two_operands() -> None:
    x, y = floats(8), floats(8, seed=1)
    both("__mul__", (x, x), (x, y), (y, x))


def test_a_cast_to_its_own_type_gives_the_tensor_itself() -> None:
    cast, x, y = planned_operation(OPERATIONS["cast"], BUILDER), floats(8), floats(8, seed=1)
    assert cast(x, F32) is x
    assert cast(y, F32) is y


def test_zeros_of_either_sign_and_numbers_of_other_types_have_plans_of_their_own() -> None:
    both("__mul__", *[(floats(8), scalar) for scalar in (0.0, -0.0, 1, 1.0, True)])


def test_loads_and_stores_see_memory_as_it_is() -> None:
    memory = torch.arange(8.0)
    addresses = memory.data_ptr() + 4 * np.arange(8, dtype=np.uint64)
    pointers = tensor(addresses, tl.pointer_type(F32))
    even = tensor(np.arange(8) % 2 == 0, tl.int1)
    load, store = planned_operation(OPERATIONS["load"], BUILDER), planned_operation(OPERATIONS["store"], BUILDER)
    for turn in range(3):
        memory.fill_(turn)
        store(pointers, floats(8, seed=turn), mask=even)
        wanted = np.where(even.handle.data, floats(8, seed=turn).handle.data, np.float32(turn))
        assert (memory.numpy() == wanted).all()
        assert (load(pointers).handle.data == wanted).all()
        assert (load(pointers, mask=even, other=7.0).handle.data == np.where(even.handle.data, wanted, 7)).all()


def test_failures_are_triton_s_own_each_time() -> None:
    add = planned_operation(OPERATIONS["__add__"], BUILDER)
    for _ in range(2):
        with pytest.raises(ValueError, match="incompatible dimensions"):
            add(floats(4), floats(8))


@pytest.mark.parametrize("is_subnormal", [False, True])
def test_conversions_of_bfloat16_are_the_same(is_subnormal: bool) -> None:
    wide = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    wide = np.concatenate([wide, [0, 1 << 31, 0x7F800000, 0x7F800001, 0x7FFFFFFF]]).astype(np.uint32)
    short = np.arange(1 << 16, dtype=np.uint16)
    if not is_subnormal:
        wide = wide[((wide & 0x7F800000) != 0) | ((wide & 0x7FFFFFFF) == 0)]
        short = short[((short & 0x7F80) != 0) | ((short & 0x7FFF) == 0)]
    cases = [(wide.view(np.float32), F32, tl.bfloat16), (short, tl.bfloat16, F32), (short[:9].T, tl.bfloat16, F32)]
    quick = [interpreter._convert_float(*case, None) for case in cases]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", CONVERT)
        for case, found in zip(cases, quick, strict=True):
            wanted = interpreter._convert_float(*case, None)
            assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(x: Any, out: Any, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x + rows * COLUMNS + columns, mask=columns < COLUMNS - 1, other=0.0)
    norms = tl.sqrt(tl.sum(values * values, axis=1))
    tl.store(out + tl.program_id(0) * ROWS + tl.arange(0, ROWS), norms + tl.program_id(0))


def test_a_kernel_makes_plans_in_its_first_program_and_follows_them_in_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = []
    record = interpreter_plans._record
    monkeypatch.setattr(interpreter_plans, "_record", lambda *args: recorded.append(args[0]) or record(*args))
    x, out = torch.randn(4, 8), torch.empty(5, 4)
    _kernel[(5,)](x, out, 4, 8)
    torch.testing.assert_close(out, x[:, :-1].norm(dim=1) + torch.arange(5.0)[:, None])
    count = len(recorded)
    _kernel[(5,)](x, out, 4, 8)
    assert len(recorded) == count > 0

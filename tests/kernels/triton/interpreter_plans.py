"""Makes Triton's interpreter decide once how it does an operation on operands of given types.

For each operation it derives types and shapes, converts and broadcasts operands and wraps results, which takes many
times as long as numpy's work on small blocks. All of that follows from the operands' types and from the arguments that
are no tensors. So the first operation of a kind runs as Triton has it, while the calls that it makes to the
interpreter's builder are recorded; later ones only make these calls. Of the calls, simple ones become a line of numpy,
after its result has been compared with the call's bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_LEAVES = {"unary_op", "binary_op", "ternary_op", "cast_impl"}
"""Methods that many of a builder's methods consist of."""

_PURE = {"create_splat", "create_broadcast", "create_expand_dims", "create_make_range", "cast_impl"}
"""Calls whose result is kept where all that they get is the same at every operation of the kind."""

_NAME = re.compile(r"\b[acdhrt]\d+\b")

_NO_PLAN: Any = object()


class _NotPlannedError(Exception):
    """The operation has arguments, makes calls or gives results that a plan can't have."""


def use_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter. The names are private to Triton: if another version lacks one, this fails."""
    for name in (*_LEAVES, *_PURE, *_NUMPY):
        getattr(InterpreterBuilder, name)
    planned: dict[int, list[tuple[str, Any, Any]]] = {}
    """By package: name, operation, operation with plans."""

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in planned:
            members = [(name, getattr(package, name)) for name in dir(package)]
            planned[id(package)] = [
                (name, member, planned_operation(member, builder)) for name, member in members if is_builtin(member)
            ]
        for name, member, operation in planned[id(package)]:
            if getattr(package, name) is member:
                scope.set_attr(package, name, operation)

    is_builtin = tl.core.is_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)


def planned_operation(member: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """An operation of triton.language that makes plans and follows them."""
    plans: dict[Any, Any] = {}
    semantic = TritonSemantic(builder)

    def operation(*args: Any, **kwargs: Any) -> Any:
        if kwargs and "_semantic" in kwargs:
            if kwargs["_semantic"] is not None:  # called by another operation
                return member(*args, **kwargs)
            del kwargs["_semantic"]
        try:
            if kwargs:
                kind: Any = (len(args), *map(_kind_of, args), *kwargs, *map(_kind_of, kwargs.values()))
            else:
                kind = tuple(map(_kind_of, args))
        except _NotPlannedError:
            return member(*args, **kwargs, _semantic=semantic)
        plan = plans.get(kind)
        if plan is None:
            result, plans[kind] = _record(member, builder, args, kwargs)
            return result
        if plan is _NO_PLAN:
            return member(*args, **kwargs, _semantic=semantic)
        return plan(args, kwargs)

    return operation


def _kind_of(x: Any) -> Any:
    """What decisions about an argument depend on."""
    kind = type(x)
    if kind is tl.tensor:
        try:
            return x._kind_of_operand
        except AttributeError:
            known = x._kind_of_operand = _kind_of_tensor(x.type, x.handle)
            return known
    if x is None or kind is int or kind is bool or kind is str:
        return kind, x
    if kind is float:
        return kind, x.hex()  # tells -0.0 from 0.0
    if kind is tl.constexpr:
        return kind, _kind_of(x.value)
    if isinstance(x, tl.dtype):
        return kind, x.name
    if kind is tuple or kind is list:
        return kind, tuple(map(_kind_of, x))
    if kind is slice and x == slice(None):
        return kind
    raise _NotPlannedError


_kinds: dict[Any, int] = {}


def _kind_of_tensor(dtype: Any, handle: Any) -> int:
    data = handle.data
    return _kinds.setdefault((dtype.name, handle.dtype.name, data.dtype.num, data.shape), len(_kinds))


class _Handle(TensorHandle):  # type: ignore[misc]
    """Of data whose size fits the type."""

    def __init__(self, data: Any, dtype: Any) -> None:
        self.data, self.dtype = data, dtype
        self.attr: dict[str, Any] = {}


class _Value:
    """A handle in a plan: the expression of its data, and its own once a line makes it. `narrow` is the expression and
    data of what was broadcast to it."""

    def __init__(self, handle: Any, data: str, name: str | None, narrow: tuple[str, Any] | None = None) -> None:
        self.handle, self.data, self.name, self.narrow = handle, data, name, narrow or (data, handle.data)


class _Recorder:
    """A builder that also writes the lines of a plan. Names: a for the handles of operands, r for results of calls, d
    for data, h for handles made of it, t for tensors, c for what is the same at each operation."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._values: dict[int, _Value] = {}
        """By id of a handle, which the value keeps alive."""
        self._leaves: list[tuple[str, tuple[Any, ...], Any]] | None = None
        self.is_planned = True
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "builder": builder,
            "new": object.__new__,
            "Handle": _Handle,
            "Tensor": tl.tensor,
            "full": _full,
            "broadcast_to": np.broadcast_to,
            "concatenate": np.concatenate,
            "uint64": np.uint64,
            "load": interpreter._interpreter.load,
        }

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._builder, name)
        if name in _LEAVES:
            return lambda *args: self._leaf(name, value, args)
        if name.startswith(("create_", "get_")) and callable(value):
            return lambda *args, **kwargs: self._call(name, value, args, kwargs)
        return value

    def take(self, handle: Any, name: str) -> None:
        """An operand's handle."""
        self._values[id(handle)] = _Value(handle, f"{name}.data", name)

    def constant(self, x: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name

    def handle(self, x: Any) -> str:
        """The expression of a handle. Writes the line that makes it."""
        value = self._value(x)
        if value.name is None:
            value.name = f"h{len(self.lines)}"
            attributes = f"'data': {value.data}, 'dtype': {self.constant(x.dtype)}, 'attr': {{}}"
            self.lines.append(f"{value.name} = new(Handle); {value.name}.__dict__ = {{{attributes}}}")
        return value.name

    def tensor(self, x: Any) -> str:
        """As `handle`, for a result."""
        if x.handle is None:  # a store's
            return self.constant(x)
        handle, name = self.handle(x.handle), f"t{len(self.lines)}"
        x._kind_of_operand = _kind_of_tensor(x.type, x.handle)
        attributes = [f"{key!r}: {self.constant(value)}" for key, value in x.__dict__.items() if key != "handle"]
        self.lines.append(f"{name} = new(Tensor); {name}.__dict__ = {{'handle': {handle}, {', '.join(attributes)}}}")
        return name

    def _value(self, handle: Any) -> _Value:
        if id(handle) not in self._values:
            raise _NotPlannedError
        return self._values[id(handle)]

    def _keep(self, handle: Any) -> None:
        """A handle that is the same at each operation."""
        handle.data.flags.writeable = False
        self._values[id(handle)] = _Value(handle, self.constant(handle.data), self.constant(handle))

    def _is_kept(self, x: Any) -> bool:
        return not isinstance(x, TensorHandle) or str(self._value(x).name).startswith("c")

    def _call(self, name: str, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._leaves is not None:  # by another of the builder's methods
            return method(*args, **kwargs)
        self._leaves = []
        try:
            result = getattr(type(self._builder), name)(self, *args, **kwargs)
            leaves = self._leaves
        finally:
            self._leaves = None
        try:
            if name.startswith("get_"):
                if isinstance(result, TensorHandle):
                    self._keep(result)
            elif kwargs:
                raise _NotPlannedError
            elif len(leaves) == 1 and leaves[0][2] is result and leaves[0][1][0] is args[0]:
                self._write(*leaves[0])
            else:
                self._write(name, args, result)
        except _NotPlannedError:
            self.is_planned = False
        return result

    def _leaf(self, name: str, method: Any, args: tuple[Any, ...]) -> Any:
        result = method(*args)
        if self._leaves is not None:
            self._leaves.append((name, args, result))
        return result

    def _write(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in _PURE and all(map(self._is_kept, args)):
            self._keep(result)
            return
        place = len(self.lines)
        if name in _NUMPY:
            values = [self._value(x) if isinstance(x, TensorHandle) else x for x in args]
            with np.errstate(all="ignore"):
                expression = _NUMPY[name](self, values, result)
            if expression is not None:
                self.lines.append(f"d{place} = {expression}")
                narrow = values[0].narrow if name == "create_broadcast" else None
                self._values[id(result)] = _Value(result, f"d{place}", None, narrow)
                return
        handles = [self.handle(x) if isinstance(x, TensorHandle) else self.constant(x) for x in args]
        place = len(self.lines)
        self.lines.append(f"r{place} = builder.{name}({', '.join(handles)})")
        if isinstance(result, TensorHandle):
            self._values[id(result)] = _Value(result, f"r{place}.data", f"r{place}")
        elif isinstance(result, tuple) and all(isinstance(x, TensorHandle) for x in result):
            for i, x in enumerate(result):
                self._values[id(x)] = _Value(x, f"r{place}[{i}].data", f"r{place}[{i}]")
        elif result is not None:
            raise _NotPlannedError


def _same(found: Any, wanted: Any) -> bool:
    return bool(
        isinstance(found, np.ndarray)
        and isinstance(wanted, np.ndarray)
        and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        and found.tobytes() == wanted.tobytes()
    )


def _narrow(values: list[_Value], result: Any) -> tuple[list[str], list[Any]]:
    """Expressions and data of the operands, before they were broadcast if numpy does that by itself."""
    pairs = [value.narrow for value in values]
    if np.broadcast_shapes(*(data.shape for _, data in pairs)) != result.data.shape:
        pairs = [(value.data, value.handle.data) for value in values]
    return [expression for expression, _ in pairs], [data for _, data in pairs]


def _elementwise(recorder: _Recorder, values: list[Any], result: Any) -> str | None:
    *operands, op = values
    if all(x.handle.data.dtype == np.bool_ for x in operands):  # Triton 3.9 computes some of them in another type
        return None
    names, datas = _narrow(operands, result)
    output, expression = op(*datas), f"{recorder.constant(op)}({', '.join(names)})"
    wanted = result.data.dtype
    if output.dtype != wanted:
        output, expression = output.astype(wanted), f"{expression}.astype({recorder.constant(wanted)})"
    return expression if _same(output, result.data) else None


def _cast(recorder: _Recorder, values: list[Any], result: Any) -> str | None:
    x, dtype = values
    if {x.handle.dtype.scalar.name, dtype.scalar.name} == {"bf16", "fp32"}:
        return None
    wanted = result.data.dtype
    same = _same(x.handle.data.astype(wanted), result.data)
    return f"{x.data}.astype({recorder.constant(wanted)})" if same else None


def _expand_dims(recorder: _Recorder, values: list[Any], result: Any) -> str | None:
    x, axis = values
    place = (*[slice(None)] * axis, None)
    return f"{x.data}[{recorder.constant(place)}]" if _same(x.handle.data[place], result.data) else None


def _broadcast(recorder: _Recorder, values: list[Any], result: Any) -> str | None:
    x, shape = values
    same = _same(np.broadcast_to(x.handle.data, tuple(shape)), result.data)
    return f"broadcast_to({x.data}, {recorder.constant(tuple(shape))})" if same else None


def _splat(recorder: _Recorder, values: list[Any], result: Any) -> str | None:
    _, x = values
    shape, dtype = result.data.shape, result.data.dtype
    if x.handle.data.shape != (1,) or not _same(_full(shape, x.handle.data, dtype), result.data):
        return None
    return f"full({recorder.constant(shape)}, {x.data}, {recorder.constant(dtype)})"


def _full(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
    data = np.ndarray(shape, dtype)
    data[...] = value
    return data


def _addptr(recorder: _Recorder, values: list[Any], result: Any) -> str | None:
    size = max(1, values[0].handle.get_element_ty().primitive_bitwidth // 8)
    (pointers, offsets), (first, steps) = _narrow(values, result)
    same = _same(first + size * steps.astype(np.uint64), result.data)
    return f"{pointers} + {size} * {offsets}.astype(uint64)" if same else None


def _join(recorder: _Recorder, values: list[Any], result: Any) -> str | None:
    left, right = values
    same = _same(np.concatenate((left.handle.data[..., None], right.handle.data[..., None]), axis=-1), result.data)
    return f"concatenate(({left.data}[..., None], {right.data}[..., None]), axis=-1)" if same else None


def _load(recorder: _Recorder, values: list[Any], result: Any) -> str:
    """Not tried: a second load might see another thread's store."""
    pointers, *rest = values
    mask, other = ([x if isinstance(x, _Value) else None for x in rest] + [None, None])[:2]
    dtype = result.data.dtype
    masks = recorder.constant(np.ones_like(pointers.handle.data, bool)) if mask is None else mask.data
    others = recorder.constant(np.zeros_like(pointers.handle.data, dtype)) if other is None else other.data
    return f"load({pointers.data}, {masks}, {others}, {recorder.constant(dtype)})"


_NUMPY: dict[str, Callable[[_Recorder, list[Any], Any], str | None]] = {
    "unary_op": _elementwise,
    "binary_op": _elementwise,
    "ternary_op": _elementwise,
    "cast_impl": _cast,
    "create_expand_dims": _expand_dims,
    "create_broadcast": _broadcast,
    "create_splat": _splat,
    "create_addptr": _addptr,
    "create_join": _join,
    "create_load": _load,
    "create_masked_load": _load,
}
"""Calls that a line of numpy may replace: what returns it, or None if its result isn't the call's."""


def _record(member: Any, builder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The operation's result, and the plan of operations of its kind."""
    recorder = _Recorder(builder)
    operands: dict[int, tuple[str, Any, Any]] = {}
    """By id of the copy that the operation gets: expression, tensor, copy."""

    def taken(x: Any, place: str) -> Any:
        if type(x) is tuple or type(x) is list:
            return type(x)([taken(y, f"{place}[{i}]") for i, y in enumerate(x)])
        if type(x) is not tl.tensor:
            return x
        # A handle of its own: an operand that comes twice here may be two others later.
        handle, name = _Handle(x.handle.data, x.handle.dtype), f"a{len(operands)}"
        recorder.take(handle, name)
        copy = tl.tensor(handle, x.type)
        operands[id(copy)] = place, x, copy
        recorder.lines.append(f"{name} = {place}.handle")
        return copy

    copies = [taken(x, f"args[{i}]") for i, x in enumerate(args)]
    named = {name: taken(x, f"kwargs[{name!r}]") for name, x in kwargs.items()}
    result = member(*copies, **named, _semantic=TritonSemantic(recorder))

    def returned(x: Any) -> tuple[Any, str]:
        if id(x) in operands:
            place, original, _ = operands[id(x)]
            return original, place
        if type(x) is tl.tensor:
            return x, recorder.tensor(x) if recorder.is_planned else ""
        if x is None:
            return x, "None"
        if type(x) is tuple or type(x) is list:
            pairs = [returned(y) for y in x]
            return type(x)([y for y, _ in pairs]), f"{type(x).__name__}([{', '.join(name for _, name in pairs)}])"
        recorder.is_planned = False
        return x, ""

    try:
        result, expression = returned(result)
    except _NotPlannedError:
        recorder.is_planned = False
        result, expression = returned(result)
    if not recorder.is_planned:
        return result, _NO_PLAN
    lines = _needed([*recorder.lines, f"return {expression}"])
    exec("\n    ".join(["def plan(args, kwargs):", *lines]), recorder.names)
    return result, recorder.names["plan"]


def _needed(lines: list[str]) -> list[str]:
    """The lines without those of numpy whose value isn't used."""
    used: set[str] = set()
    needed = []
    for line in reversed(lines):
        names = _NAME.findall(line)
        if line.startswith("d"):
            if names[0] not in used:
                continue
            del names[0]
        used.update(names)
        needed.append(line)
    return needed[::-1]

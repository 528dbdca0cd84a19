"""The tensors that a module makes on its forward path: which may be pooled, and why the others may not."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.factory import Lent, Reader, is_simple, operation
from auditor.adopt.region import Lives, Region
from auditor.adopt.uses import Function, Uses
from auditor.source.imports import dotted_text

_ENTRY_POINTS = ("forward", "__call__")
_FEW = 1 << 16  # elements: below that no threshold would let the pool have it
_WITHOUT_SELF = frozenset(("staticmethod", "classmethod"))


@dataclass(frozen=True)
class Temporary:
    """A tensor to take from the pool. `owner` is what the method calls its object."""

    call: ast.Call
    made_by: str
    lent: Lent
    region: Region
    owner: str

    @property
    def name(self) -> str | None:
        """The name that the call is bound to, where the statement is just that."""
        match self.region.statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if value is self.call:
                return name
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is self.call:
                return name
        return None


@dataclass(frozen=True)
class Kept:
    """A tensor that stays plain torch memory, and why."""

    line: int
    made_by: str
    reason: str


def judged(draft: Draft, owner: ast.ClassDef, origins: Mapping[str, str]) -> Iterator[Temporary | Kept]:
    """Every factory call on the forward path, in the order of the source."""
    for method in forward_path(owner):
        calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
        made = [(call, made_by) for call in calls if (made_by := operation(call, origins))]
        if not made:
            continue
        lives = Lives(draft, method, Uses(draft.parents, origins, method))
        for call, made_by in sorted(made, key=lambda each: draft.start(each[0])):
            try:
                yield _judge(draft, method, lives, call, made_by, origins)
            except Refused as refusal:
                yield Kept(call.lineno, made_by, str(refusal))


def _judge(
    draft: Draft, method: Function, lives: Lives, call: ast.Call, made_by: str, origins: Mapping[str, str]
) -> Temporary:
    _check_method(method)
    shapes = _Shapes(method)
    if _is_small(call, shapes):
        raise Refused("it is small")
    torch = next((name for name, stands_for in origins.items() if stands_for == "torch"), None)
    region = lives.region(call)
    if torch is None:
        raise Refused("the file does not import torch as a module")
    if any(not is_simple(each) for each in _parts(call)):
        raise Refused("its arguments are calls, which may do more than give a size")
    _check_text(draft, region)
    lent = Reader(torch, draft.source, shapes.is_sequence).read(call, made_by)
    return Temporary(call, made_by, lent, region, method.args.args[0].arg)


def forward_path(owner: ast.ClassDef) -> list[Function]:
    """The entry points of a module, and the methods that they reach on the object itself."""
    methods = {
        each.name: each for each in owner.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    waiting = [name for name in _ENTRY_POINTS if name in methods]
    reached: dict[str, Function] = {}
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = methods[name]
            waiting += [called for called in _own_calls(methods[name]) if called in methods]
    return sorted(reached.values(), key=lambda each: each.lineno)


def _own_calls(method: Function) -> Iterator[str]:
    first = next(iter([*method.args.posonlyargs, *method.args.args]), None)
    for node in ast.walk(method):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=called)) if (
                first and name == first.arg
            ):
                yield called


def _check_method(method: Function) -> None:
    if isinstance(method, ast.AsyncFunctionDef):
        raise Refused(f"`{method.name}` is asynchronous")
    decorators = [dotted_text(each) or "" for each in method.decorator_list]
    if not method.args.args or _WITHOUT_SELF & set(decorators):
        raise Refused(f"`{method.name}` has no object of its own to ask")
    if any(".jit." in f".{each}" for each in decorators):
        raise Refused(f"`{method.name}` is compiled by torch.jit")
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(method)):
        raise Refused(f"`{method.name}` is a generator, which may never be finished")


def _check_text(draft: Draft, region: Region) -> None:
    """Whether the statements can be indented as they stand."""
    last = region.block[region.last]
    if not (draft.alone(region.statement) and draft.alone(last)):
        raise Refused("its statement shares a line with another")
    first_line, last_line = draft.start(region.statement)[0], draft.end(last)[0]
    if any(line.startswith("\f") for line in draft.lines[first_line - 1 : last_line]):
        raise Refused("its lines begin with form feeds")
    draft.inner_lines(first_line, last_line)


def _parts(call: ast.Call) -> list[ast.expr]:
    receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [*receiver, *call.args, *(word.value for word in call.keywords)]


def _is_small(call: ast.Call, shapes: "_Shapes") -> bool:
    """Whether its sizes say so: one dimension, or constants of little product."""
    sizes = next(([word.value] for word in call.keywords if word.arg == "size"), list(call.args))
    match sizes:
        case [ast.Tuple(elts=elements) | ast.List(elts=elements), *_]:
            sizes = elements
        case [only] if shapes.is_sequence(only) is not False:
            return False
    if any(isinstance(each, ast.Starred) for each in sizes):
        return False
    product = 1
    for each in sizes:
        if isinstance(each, ast.Constant) and isinstance(each.value, int):
            product *= each.value
    symbols = sum(not isinstance(each, ast.Constant) for each in sizes)
    return symbols < 2 and product < (_FEW if symbols == 0 else 1 << 10)


class _Shapes:
    """Tells a shape from a single size, by how the method made the name."""

    def __init__(self, method: Function) -> None:
        self._values: dict[str, list[ast.expr]] = {}
        self._stores: Counter[str] = Counter()
        for node in ast.walk(method):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._values.setdefault(name, []).append(value)
                case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Attribute(attr="shape")):
                    for each in elements:
                        if isinstance(each, ast.Name):
                            self._values.setdefault(each.id, []).append(ast.Constant(1))
                case ast.Name(id=name, ctx=ast.Store()):
                    self._stores[name] += 1

    def is_sequence(self, node: ast.expr) -> bool | None:
        """True for a shape, False for a number, None where it cannot be told."""
        match node:
            case ast.Tuple() | ast.List() | ast.Attribute(attr="shape"):
                return True
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return True in (self.is_sequence(left), self.is_sequence(right))
            case ast.Constant(value=int()) | ast.BinOp(op=ast.FloorDiv() | ast.Sub()):
                return False
            case ast.Call(func=ast.Attribute(attr="size"), args=args):
                return not args
            case ast.Call(func=ast.Name(id="tuple" | "list")):
                return True
            case ast.Call(func=ast.Name(id="len" | "int" | "max" | "min")):
                return False
            case ast.Subscript(value=ast.Attribute(attr="shape"), slice=index):
                return isinstance(index, ast.Slice)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _agreed({self.is_sequence(left), self.is_sequence(right)} - {None})
            case ast.Name(id=name) if self._stores[name] == len(self._values.get(name, ())):
                return self._of_name(name)
        return None

    def _of_name(self, name: str) -> bool | None:
        values = self._values.pop(name, [])  # `n = n + 1` tells nothing of n
        try:
            return _agreed({self.is_sequence(each) for each in values})
        finally:
            self._values[name] = values


def _agreed(known: set[bool | None]) -> bool | None:
    return next(iter(known)) if len(known) == 1 else None

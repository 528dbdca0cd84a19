"""The tensors that a module makes on its forward path: which may be pooled, and why the others may not."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.factory import Lent, Reader, is_simple, operation
from auditor.adopt.forward_path import forward_path
from auditor.adopt.helpers import LEASE, helpers, lender_of_helper, refuse_unfinished
from auditor.adopt.region import Lives, Region
from auditor.adopt.uses import Function, Uses
from auditor.source.imports import dotted_text

_FEW = 1 << 16  # elements: below that no threshold would let the pool have it
_WITHOUT_SELF = frozenset(("staticmethod", "classmethod"))


@dataclass(frozen=True)
class Temporary:
    """A tensor to take from the pool. `lender` is what is asked for it: `self._lease_tensor`."""

    call: ast.Call
    made_by: str
    lent: Lent
    region: Region
    lender: str

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
    """Every factory call on the forward path, helpers last, in the order of the source."""
    for method in forward_path(owner):
        yield from _made_in(draft, method, origins, _lender_of_method)
    for helper in helpers(draft, owner):
        yield from _made_in(draft, helper, origins, lender_of_helper)


def _made_in(
    draft: Draft, function: Function, origins: Mapping[str, str], lender: Callable[[Function], str]
) -> Iterator[Temporary | Kept]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    made = [(call, made_by) for call in calls if (made_by := operation(call, origins))]
    if not made:
        return
    lives = Lives(draft, function, Uses(draft.parents, origins, function))
    for call, made_by in sorted(made, key=lambda each: draft.start(each[0])):
        try:
            yield _judge(draft, function, lives, call, made_by, origins, lender(function))
        except Refused as refusal:
            yield Kept(call.lineno, made_by, str(refusal))


def _judge(
    draft: Draft,
    method: Function,
    lives: Lives,
    call: ast.Call,
    made_by: str,
    origins: Mapping[str, str],
    lender: str,
) -> Temporary:
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
    return Temporary(call, made_by, lent, region, lender)


def _lender_of_method(method: Function) -> str:
    """The object's own method. Raises Refused where there is no object, or where it may not be asked."""
    refuse_unfinished(method)
    decorators = [dotted_text(each) or "" for each in method.decorator_list]
    if not method.args.args or _WITHOUT_SELF & set(decorators):
        raise Refused(f"`{method.name}` has no object of its own to ask")
    if any(".jit." in f".{each}" for each in decorators):
        raise Refused(f"`{method.name}` is compiled by torch.jit")
    return f"{method.args.args[0].arg}.{LEASE}"


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
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    if len(names) == len(values):
                        for each, value in zip(names, values, strict=True):
                            if isinstance(each, ast.Name):
                                self._values.setdefault(each.id, []).append(value)
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

"""Which methods hand out numbers of which 0 is one: `if slot: pool.free(slot)` takes that for nothing."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assignments, given_to, own_attribute, ways
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.shapes.field_work import FieldWork, field_work
from auditor.project.shapes.full_at_first import AROUND, NUMBERING, beginning
from auditor.project.shapes.made_new import MAKERS
from auditor.source.nodes import walk

SEARCHING = frozenset({"nonzero", "flatnonzero", "argmax", "argmin", "index", "argwhere", "where"})
"""Functions, and methods of lists and tensors, that tell a place in a table."""

DEEPEST = 3


def hands_out_zero(family: Sequence[Class], method: Function) -> bool:
    """Whether one of its ways out returns a number of a store that was filled from 0 on, or a place in a
    table; not where 0 was set aside, or says that there is none."""
    methods = {name: each for cls in reversed(family) for name, each in cls.methods.items()}
    works = [field_work(each) for each in methods.values()]
    begun = beginning(works)
    set_aside = {name for work in begun for name, _ in (*work.taken, *work.removed)}
    stores = {name for work in begun for name in _filled_from_zero(work)} - set_aside
    return _Returned(methods, stores, set(_tables(begun))).is_zero(method)


def hands_out_zero_of_module(function: Function) -> bool:
    """The same of a function: `return _free.popleft()` of the module's `_free = deque(range(count))`."""
    assigned = function.module.assigned
    stores = {name for name in assigned if _begins_with_zero(assigned[name], function)}
    returned = [node.value for node in function.statements if isinstance(node, ast.Return) and node.value]
    given = [way for value in returned for each in _spelled(function, value) for way in ways(each)]
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in ("pop", "popleft")
        and getattr(each.func.value, "id", "") in stores
        for each in given
    )


def _spelled(function: Function, value: ast.expr) -> list[ast.expr]:
    return list(given_to(function, value.id)) if isinstance(value, ast.Name) else [value]


def _filled_from_zero(work: FieldWork) -> Iterator[str]:
    own = work.method.owner or ""
    for target, value in assignments(work.method):
        if (name := own_attribute(target, own)) is not None and _begins_with_zero(value, work.method):
            yield name
    for put in work.put:
        if _begins_with_zero(put.value, work.method) or _is_turn(work.method, put.thing):
            yield put.field


def _is_turn(method: Function, value: ast.expr) -> bool:
    """`for number in range(count): self.free.put(number)`"""
    return isinstance(value, ast.Name) and any(
        isinstance(node, ast.For)
        and isinstance(node.target, ast.Name)
        and node.target.id == value.id
        and _begins_with_zero(node.iter, method)
        for node in method.statements
    )


def _begins_with_zero(value: ast.expr, method: Function) -> bool:
    """`list(range(n))`, `range(n - 1, -1, -1)`, `torch.arange(n).tolist()`, `{Page(i) for i in range(n)}`
    of a new type."""
    match value:
        case ast.Call(func=func, args=args) if last_part(func) in NUMBERING:
            spelled = [ast.unparse(each) for each in args]
            return len(spelled) == 1 or spelled[:1] == ["0"] or spelled[1:2] == ["-1"]
        case ast.Call(func=func, args=[inner, *_]) if last_part(func) in AROUND | {"fromkeys"}:
            return _begins_with_zero(inner, method)
        case ast.Call(func=ast.Attribute(value=inner), args=[]):
            return _begins_with_zero(inner, method)
        case ast.Subscript(value=inner, slice=ast.Slice(lower=None)):
            return _begins_with_zero(inner, method)
        case (
            ast.ListComp(elt=each, generators=[ast.comprehension(target=turn, iter=inner, ifs=[])])
            | ast.SetComp(elt=each, generators=[ast.comprehension(target=turn, iter=inner, ifs=[])])
            | ast.DictComp(key=each, generators=[ast.comprehension(target=turn, iter=inner, ifs=[])])
        ):
            if isinstance(each, ast.Call) and f"{last_part(each.func)} = NewType(" in method.module.text:
                each = each.args[0]
            return getattr(each, "id", "") == getattr(turn, "id", None) and _begins_with_zero(inner, method)
    return False


def _tables(begun: Sequence[FieldWork]) -> Iterator[str]:
    """`[None] * n`, `[Slot() for _ in range(n)]`, `torch.zeros(n, dtype=torch.bool)`: places from 0 on."""
    for work in begun:
        for target, value in assignments(work.method):
            name = own_attribute(target, work.method.owner or "")
            match value:
                case ast.BinOp(left=ast.List(), op=ast.Mult()) | ast.ListComp():
                    yield from [name] if name else []
                case ast.Call(func=func) if last_part(func) in MAKERS:
                    yield from [name] if name else []


def _is_bit(place: ast.expr, name: str) -> bool:
    match place:
        case ast.BinOp(left=ast.Constant(value=1), op=ast.LShift(), right=ast.Name(id=number)):
            return number == name
    return False


class _Returned:
    """Follows what a method returns to where it takes that from."""

    def __init__(self, methods: dict[str, Function], stores: set[str], tables: set[str]) -> None:
        self.methods = methods
        self.stores = stores
        self.tables = tables

    def is_zero(self, method: Function, depth: int = 0) -> bool:
        if depth > DEEPEST:
            return False
        work = field_work(method)
        returned = [way for value in work.returned for way in ways(value)]
        if any(isinstance(each, ast.Constant) and each.value == 0 for each in returned):
            return False
        return any(self._is_number(work, each, depth) for each in returned)

    def _is_number(self, work: FieldWork, value: ast.expr, depth: int) -> bool:
        if depth > DEEPEST:
            return False  # `row = int(row)` leads back to itself
        own = work.method.owner or ""
        if any(node is value and name in self.stores for name, node in work.taken):
            return isinstance(value, ast.Call)
        match value:
            case ast.Call(func=ast.Name(id="int" | "min" | "next" | "iter"), args=[inner, *_]):
                return own_attribute(inner, own) in self.stores or self._is_number(work, inner, depth)
            case ast.GeneratorExp(
                elt=ast.Name(id=number),
                generators=[ast.comprehension(target=ast.Name(id=turn), iter=over)],
            ):  # `next(i for i in range(self.n) if i not in self.busy)`
                return number == turn and _begins_with_zero(over, work.method)
            case ast.Call(func=func) if (name := own_attribute(func, own)) in self.methods:
                return self.is_zero(self.methods[name], depth + 1) if name is not None else False
            case ast.Subscript(value=store, slice=key) if not isinstance(key, ast.Slice):
                return own_attribute(store, own) in self.stores
            case ast.Name(id=name):
                given = [way for each in self._given(work, name) for way in ways(each)]
                return any(self._is_number(work, each, depth + 1) for each in given) or (
                    self._is_entered(work, name) and self._is_found(work.method, name)
                )
        return False

    def _given(self, work: FieldWork, name: str) -> Iterator[ast.expr]:
        """`number, _ = self.free.popitem()` included."""
        yield from (value for value in given_to(work.method, name))
        for node in work.method.statements:
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=first), _])], value=value):
                    if first == name and getattr(getattr(value, "func", None), "attr", "") == "popitem":
                        yield value

    def _is_entered(self, work: FieldWork, name: str) -> bool:
        """`self.used[number] = True`, `self.used |= 1 << number`"""
        own = work.method.owner or ""
        return any(each.bit and each.on and _is_bit(each.place, name) for each in work.marked) or any(
            isinstance(target, ast.Subscript)
            and own_attribute(target.value, own) in self.tables
            and getattr(target.slice, "id", "") == name
            for target, _ in assignments(work.method)
        )

    def _is_found(self, method: Function, name: str) -> bool:
        """By going over all places, or by asking the table."""
        for node in method.statements:
            match node:
                case ast.For(
                    target=ast.Tuple(elts=[ast.Name(id=turn), _]),
                    iter=ast.Call(func=ast.Name(id="enumerate"), args=[_], keywords=[]),
                ) if turn == name:
                    return True
                case ast.For(target=ast.Name(id=turn), iter=over) if turn == name:
                    return _begins_with_zero(over, method)
        return any(self._searches(method, value) for value in given_to(method, name))

    def _searches(self, method: Function, value: ast.expr) -> bool:
        """`int(free[0])` of `free = (~self.used).nonzero()`; `next(i for i, used in enumerate(self.used) if
        not used)`."""
        named = {node.id for node in walk(value) if isinstance(node, ast.Name)}
        values = [value, *(each for name in sorted(named) for each in given_to(method, name))]
        calls = [node for each in values for node in walk(each) if isinstance(node, ast.Call)]
        plain = not any(isinstance(node, ast.BinOp) for each in values for node in walk(each))
        return plain and any(last_part(call.func) in SEARCHING | {"enumerate"} for call in calls)

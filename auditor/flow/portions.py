"""Lists that this acquire alone fills, and whether `blocks[:n]`, `blocks[0]` or a mask leaves something of one.

Where the whole may be meant (`blocks[:n]` of `allocate(n)`, or where somebody has compared the list's length with
that bound) it is taken to be meant."""

import ast
from collections.abc import Iterator
from functools import cache, cached_property

from auditor.ir.graph import Graph
from auditor.ir.ops import (
    ANY_ITEM,
    RAISING,
    Assume,
    Await,
    Call,
    Constant,
    Edge,
    EndStatement,
    InPlace,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
)

COUNTING = frozenset({"range", "islice", "arange", "zip", "min", "repeat"})
FILLING = frozenset({"append", "appendleft", "add", "insert", "extend", "extendleft", "update"})
RELISTING = frozenset({"list", "tuple", "sorted", "reversed", "deque", "gather", "set", "copy", "values"})
"""Calls whose result is a list of the same things."""

GOING_OVER = RELISTING | {"zip", "enumerate", "sum", "len"}
AS_MANY = GOING_OVER | {"map", "min", "max", "range", "dict"}
"""Calls whose result is as long as what they are given, or may be."""


class Lists:
    """The lists of one function that hold leases of the acquire at `site`."""

    def __init__(self, graph: Graph, site: int) -> None:
        self.graph = graph
        self.site = site
        self._filled: dict[Path, bool] = {}

    # What is in them ----------------------------------------------------------------------------------------

    def filled_here(self, name: Path) -> bool:
        """Whether nothing but leases of this acquire gets into the list of that name."""
        if name not in self._filled:
            self._filled[name] = self._filled_by_acquire(name)
        return self._filled[name]

    def several(self) -> bool:
        """Whether the acquire runs in a loop, so that there are more than one. Of one that returns a list: that
        it was not told to get a single one."""
        told = self._acquire.args
        one = len(told) == 1 and isinstance(told[0], ast.Constant) and told[0].value == 1
        return not one

    @property
    def repeated(self) -> bool:
        return self.comes_again(self.site, frozenset())

    def comes_again(self, node: int, except_by: frozenset[int]) -> bool:
        """Whether a loop around the node leads to it again past none of those."""
        seen = set(except_by)
        pending = [node] if not isinstance(self.graph.ops[node], Next) else []
        pending += (end for end, edge in self.graph.successors[node] if edge is Edge.EXHAUSTED)
        while pending:
            for target, edge in self.graph.successors[pending.pop()]:
                if target == node:
                    return True
                if edge not in RAISING and target not in seen:
                    seen.add(target)
                    pending.append(target)
        return False

    def made_at(self, name: Path) -> frozenset[int]:
        """Where the name gets another list."""
        ops = enumerate(self.graph.ops)
        return frozenset(node for node, op in ops if name in _written(op)) | {self.site}

    def is_gone_over(self, name: Path) -> bool:
        """Of a lease that is a list of numbers: that it is one, and no pair of a number and something else."""
        for op in self.graph.ops:
            match op:
                case Next(source=source) if source == name:
                    return True
                case Call(method=method, args=args) if method in GOING_OVER and any(
                    path == name for path, _ in args
                ):
                    return True
        return False

    def _filled_by_acquire(self, name: Path) -> bool:
        if len(name) > 1 and any(_puts_into(op, name) for op in self.graph.ops):
            return False
        seen, pending = {name[:1]}, [name[:1]]
        while pending:
            for source in self._sources(pending.pop()):
                if source is None:
                    return False
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
        return True

    def _sources(self, name: Path) -> Iterator[Path | None]:
        """Names of the lists that this one is made of; None for what holds something else."""
        for node, op in enumerate(self.graph.ops):
            if node == self.site or isinstance(op, Constant):
                continue
            if name in _written(op):
                yield from self._made_of(op)
            match op:
                case Store(target=target, source=source) if target[:1] == name and len(target) == 2:
                    yield from self._leases(source)
                case Call(method=method, receiver=receiver, args=args) if receiver == name and method in FILLING:
                    for path, _ in args[-1:]:
                        yield from self._leases(path)
                case InPlace(target=target, operand=operand) if target == name:
                    yield from self._leases(operand)

    def _made_of(self, op: Op) -> Iterator[Path | None]:
        match op:
            case Make(at=ast.GeneratorExp()):
                yield None  # what is not asked for any more was never acquired
            case Make(items=items):
                for _, path in items:
                    yield from self._leases(path)
            case Move(source=source, part=part) if part and len(source) == 2:
                yield None if is_number(part) else source[:1]
            case Move(source=source) | Await(source=source):
                yield source[:1] if source[1:] in ((), ("[:]",)) else None
            case Call(method="values" | "copy", receiver=tuple() as receiver, args=()):
                yield receiver[:1] if len(receiver) == 1 else None
            case Call(method=method, args=[(source, _), *_]) if method in RELISTING:
                yield from self._relisted(source)
            case _:
                yield None

    def _relisted(self, source: Path) -> Iterator[Path | None]:
        """`gather(*(pool.open(name) for name in names))` has them all."""
        for op in self.graph.ops:
            if isinstance(op, Move) and op.target == source and self._is_generator(op.source):
                return
        yield source[:1] if source[1:] in ((), ("[:]",)) else None

    def _is_generator(self, name: Path) -> bool:
        return any(
            isinstance(op, Make) and op.target == name and isinstance(op.at, ast.GeneratorExp)
            for op in self.graph.ops
        )

    def _leases(self, path: Path) -> Iterator[None]:
        """Nothing, where it is what the acquire returned, or holds that."""
        if not self._acquired(path[:1], frozenset()):
            yield None

    def _acquired(self, name: Path, seen: frozenset[Path]) -> bool:
        if name in seen:
            return False
        for node, op in enumerate(self.graph.ops):
            if name not in _written(op):
                continue
            if node == self.site:
                return True
            match op:
                case Move(source=source) | Await(source=source):
                    inputs = [source]
                case Make(items=items):
                    inputs = [item for _, item in items]
                case Call(args=args, kwargs=kwargs):
                    inputs = [given for given, _ in args] + [given for _, given in kwargs]
                case _:
                    inputs = []
            if any(self._acquired(given[:1], seen | {name}) for given in inputs):
                return True
        return False

    # How much is taken --------------------------------------------------------------------------------------

    def leaves_some(self, part: str, whole: Path) -> bool:
        """Of that list, without doubt."""
        name = "".join(whole)
        match _parsed(part):
            case ast.Slice(lower=lower, upper=upper, step=step):
                if step is not None and _number(step) not in (1, -1):
                    return _number(step) is not None
                below = lower is not None and not self._may_be_nothing(lower, name)
                return below or (upper is not None and not self._may_be_all(upper, name))
            case ast.Compare(left=left, comparators=[right]):
                return name not in (getattr(left, "id", None), getattr(right, "id", None))  # `ids[ids >= 0]`
            case ast.expr() as at:
                return _number(at) is not None
        return False

    def _may_be_nothing(self, lower: ast.expr, name: str) -> bool:
        """`blocks[0:]`; `blocks[-n:]` of `allocate(n)`."""
        if _number(lower) is not None:
            return _number(lower) == 0
        if isinstance(lower, ast.UnaryOp) and isinstance(lower.op, ast.USub):
            return self._may_be_all(lower.operand, name)
        begun = any(_number(value) == 0 for value in self._values(lower))
        return begun or self._may_be_all(lower, name)

    def _may_be_all(self, bound: ast.expr, name: str) -> bool:
        """As many as the acquire, or the loop around it, was told to get; as many as there are."""
        if isinstance(bound, ast.Constant) and bound.value is None:
            return True
        match bound:
            case ast.Call(func=ast.Name(id="max"), args=[inner, ast.Constant(value=0)]):
                return self._may_be_all(inner, name)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=other)]):
                return not self._as_others_say(other, name)
            case ast.BinOp(left=left, op=ast.FloorDiv() | ast.Sub(), right=ast.Constant()) if _is_len(left, name):
                return False
        if any(isinstance(inner, ast.Call) for inner in ast.walk(bound)):
            return True
        return self._is_counted(bound) or self._is_told(bound, name)

    def _as_others_say(self, other: str, name: str) -> bool:
        """`accepted = self.verify(draft)`: of another length, by the words of a function that has not seen the
        list."""
        values = self._values(ast.Name(id=other))
        calls = [value.value if isinstance(value, ast.Await) else value for value in values]
        decided = all(isinstance(each, ast.Call) and _last_name(each) not in AS_MANY for each in calls)
        return bool(calls) and decided and not any(_names(each) & {name} for each in calls)

    def _is_counted(self, bound: ast.expr) -> bool:
        """A name that is counted up, or is a loop's own: it may have come to the end."""
        if not isinstance(bound, ast.Name):
            return False
        loops = {op.target for op in self.graph.ops if isinstance(op, Next)}
        return (bound.id,) in loops or any(
            isinstance(op, InPlace) and op.target == (bound.id,) for op in self.graph.ops
        )

    def _is_told(self, bound: ast.expr, name: str) -> bool:
        meant = {ast.dump(bound)} | {ast.dump(value) for value in self._values(bound)}
        if any(_is_len(value, name) or _last_name(value) == "min" for value in self._values(bound)):
            return True
        told = {ast.dump(inner) for each in self._acquire.args for inner in ast.walk(each)}
        told |= {ast.dump(inner) for each in self._acquire.keywords for inner in ast.walk(each.value)}
        told |= {ast.dump(value) for each in self._acquire.args for value in self._values(each)}
        return not meant.isdisjoint(told | self._counts) or self._compared(bound, name)

    def _compared(self, bound: ast.expr, name: str) -> bool:
        """`while len(found) > width:`."""
        written = ast.unparse(bound)
        return any(
            isinstance(op, Assume) and {"len", name.split(".")[0]} <= op.names and written in op.key for op in self.graph.ops
        )

    @cached_property
    def _acquire(self) -> ast.Call:
        op = self.graph.ops[self.site]
        assert isinstance(op, Call)
        return op.at

    @cached_property
    def _counts(self) -> frozenset[str]:
        """What loops are told to count to."""
        calls = (op.at for op in self.graph.ops if isinstance(op, Call) and op.method in COUNTING)
        return frozenset(ast.dump(inner) for at in calls for each in at.args for inner in ast.walk(each))

    def _values(self, name: ast.expr) -> list[ast.expr]:
        """What is assigned to a name, as it is written."""
        return self._assigned.get(name.id, []) if isinstance(name, ast.Name) else []

    @cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = {}
        for op in self.graph.ops:
            match op:
                case EndStatement(at=ast.Assign(targets=[ast.Name(id=name)], value=value)) | Constant(
                    at=ast.Assign(targets=[ast.Name(id=name)], value=value)
                ):
                    found.setdefault(name, []).append(value)
        return found


def _puts_into(op: Op, whole: Path) -> bool:
    match op:
        case Store(target=target) | InPlace(target=target):
            return target[: len(whole)] == whole
        case Call(receiver=receiver, method=method):
            return receiver == whole and method in FILLING
    return False


def _written(op: Op) -> tuple[Path, ...]:
    if isinstance(op, Unpack):
        return tuple(target for _, target in op.targets)
    return (op.target,) if isinstance(op, Make | Move | Await | Call | Constant | Next) else ()


@cache
def _parsed(part: str) -> ast.expr | None:
    taken = ast.parse(f"_[{part}]", mode="eval").body if part else None
    return taken.slice if isinstance(taken, ast.Subscript) else None


def _number(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def is_number(part: str) -> bool:
    """`0` or `-1`, not a slice or a mask."""
    return part.lstrip("-").isdecimal()


def _is_len(node: ast.expr, name: str) -> bool:
    return ast.unparse(node) == f"len({name})"


def _last_name(node: ast.expr) -> str:
    callee = node.func if isinstance(node, ast.Call) else None
    return callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")


def _names(node: ast.expr) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}

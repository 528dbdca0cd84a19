"""Lists of one function that hold the leases of one acquire, and nothing else."""

import ast
from collections.abc import Iterator

from auditor.flow.knowledge import EXTENDING, FILLING
from auditor.flow.operands import uses
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    ANY_ITEM,
    RAISING,
    Await,
    Call,
    Constant,
    Edge,
    InPlace,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
)

PUTTING_IN = FILLING | EXTENDING
GOING_OVER = frozenset({"zip", "enumerate", "sorted", "reversed"})
RELISTING = frozenset({"list", "tuple", "sorted", "reversed", "deque", "gather", "set", "copy"})
"""Calls whose result is a list of the same things."""

EMPTY = frozenset({"list", "dict", "set", "deque", "OrderedDict"})
"""Told nothing, these make what holds nothing yet."""


class Lists:
    """The acquire is the call at `site`."""

    def __init__(self, graph: Graph, site: int) -> None:
        self.graph = graph
        self.site = site
        self._filled: dict[Path, bool] = {}

    def filled_here(self, name: Path) -> bool:
        """Whether nothing but leases of this acquire gets into the list of that name."""
        if name not in self._filled:
            self._filled[name] = self._filled_by_acquire(name)
        return self._filled[name]

    @property
    def repeated(self) -> bool:
        """Whether the acquire runs in a loop, so that there are more than one."""
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

    def puts_there_first(self, node: int, name: Path, part: str) -> bool:
        """`held[key] = take()` in each turn before `give(held[key])` or `give(held.pop(key))`: the others
        were given back in theirs."""
        at = self.graph.ops[node].at
        popped = at.args[0] if isinstance(at, ast.Call) and len(at.args) == 1 and not part else None
        key = ast.unparse(popped) if popped is not None else part
        stores = frozenset(
            number
            for number, op in enumerate(self.graph.ops)
            if isinstance(op, Store) and op.target == (*name, ANY_ITEM) and _key_of(op) == key
        )
        return bool(stores) and not self.comes_again(node, stores)

    def made_at(self, name: Path) -> frozenset[int]:
        """Where the name gets another list."""
        ops = enumerate(self.graph.ops)
        return frozenset(node for node, op in ops if name in written(op)) | {self.site}

    def is_gone_over(self, name: Path) -> bool:
        """Of what an acquire returned: that it is a list of leases, and no pair, no memory, no queue."""
        for op in self.graph.ops:
            match op:
                case Next(source=source) if source == name:
                    return True
                case Call(method=method, args=args) if method in GOING_OVER and any(
                    path == name for path, _ in args
                ):
                    return True
        return False

    def numbers_of(self, name: Path) -> set[int]:
        """By which numbers its items are called."""
        pieces = {path[len(name)] for op in self.graph.ops for path in uses(op) if _is_item(path, name)}
        return {int(piece[1:-1]) for piece in pieces if piece[1:-1].isdecimal()}

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
            if name in written(op):
                yield from self._made_of(op)
            match op:
                case Store(target=target, source=source) if target[:1] == name and len(target) == 2:
                    yield from self._leases(source)
                case Call(method=method, receiver=receiver, args=args) if (
                    receiver == name and method in FILLING
                ):
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
                yield None if part.lstrip("-").isdecimal() or part.isidentifier() else source[:1]
            case Move(source=source) | Await(source=source) | Next(source=source):
                yield source[:1] if source[1:] in ((), ("[:]",)) else None
            case Call(method="values" | "copy", receiver=tuple() as receiver, args=()):
                yield receiver[:1] if len(receiver) == 1 else None
            case Call(method=method, receiver=None | ("@collections",), args=(), kwargs=()) if (
                method in EMPTY
            ):
                return
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

    def _leases(self, path: Path) -> Iterator[Path | None]:
        """Nothing, where it is what the acquire returned, or holds that; else the list that
        a loop took it from."""
        loops = [op for op in self.graph.ops if isinstance(op, Next) and op.target == path]
        if loops:
            plain = ((), ("[:]",))  # `for slot in slots[1:]`
            yield from (op.source[:1] if op.source[1:] in plain else None for op in loops)
        elif not self._acquired(path[:1], frozenset()):
            yield None

    def _acquired(self, name: Path, seen: frozenset[Path]) -> bool:
        if name in seen:
            return False
        for node, op in enumerate(self.graph.ops):
            if name not in written(op):
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


def _is_item(path: Path, whole: Path) -> bool:
    return len(path) > len(whole) and path[: len(whole)] == whole


def _puts_into(op: Op, whole: Path) -> bool:
    match op:
        case Store(target=target) | InPlace(target=target):
            return target[: len(whole)] == whole
        case Call(receiver=receiver, method=method):
            return receiver == whole and method in PUTTING_IN
    return False


def written(op: Op) -> tuple[Path, ...]:
    """What the operation gives something to."""
    if isinstance(op, Unpack):
        return tuple(target for _, target in op.targets)
    return (op.target,) if isinstance(op, Make | Move | Await | Call | Constant | Next) else ()


def _key_of(store: Store) -> str:
    return ast.unparse(store.at.slice) if isinstance(store.at, ast.Subscript) else ""

"""Whether `blocks[:n]`, `blocks[0]` or a mask leaves something of a list of leases.

Where the whole may be meant (`blocks[:n]` of `allocate(n)`, or where somebody has compared the list's length
with that bound) it is taken to be meant."""

import ast
from functools import cache, cached_property

from auditor.flow.lists import GOING_OVER, RELISTING
from auditor.flow.operands import uses
from auditor.ir.graph import Graph
from auditor.ir.iterations import is_one, portion_of
from auditor.ir.ops import Assume, Call, Constant, EndStatement, Havoc, InPlace, Next, Nop, Path
from auditor.source.nodes import walk

COUNTING = frozenset({"range", "islice", "arange", "zip", "min", "repeat"})
AS_MANY = GOING_OVER | RELISTING | {"map", "min", "max", "range", "dict", "sum", "len"}
"""Calls whose result is as long as what they are given, or may be."""


class Portions:
    """Of the lists that hold what the acquire at `site` returned."""

    def __init__(self, graph: Graph, site: int) -> None:
        self.graph = graph
        self.site = site

    def several(self) -> bool:
        """Of an acquire that returns a list: that it was not told to get a single one."""
        given = _arguments(self._acquire)
        alone = len(given) == 1 and _number(given[0]) == 1
        return not alone and not any(len(getattr(each, "elts", "..")) == 1 for each in given)

    def how_many(self) -> int | None:
        """Of an acquire that is told a number and nothing else."""
        given = _arguments(self._acquire)
        return _number(given[0]) if len(given) == 1 else None

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
                return is_one(at) or isinstance(at, ast.Name)
        return False

    def _may_be_nothing(self, lower: ast.expr, name: str) -> bool:
        """`blocks[0:]`; `blocks[-n:]` of `allocate(n)`."""
        if _number(lower) is not None:
            return _number(lower) == 0
        if isinstance(lower, ast.UnaryOp) and isinstance(lower.op, ast.USub):
            return self._may_be_all(lower.operand, name)
        begun = any(_number(value) == 0 for value in self._values(lower))
        if begun and self._is_counted_apart(lower, name):
            return False
        return begun or self._may_be_all(lower, name)

    def _is_counted_apart(self, lower: ast.expr, name: str) -> bool:
        """`accepted += 1` in a loop that has nothing to do with the list: some of it lie before that."""
        target = (getattr(lower, "id", ""),)
        counts = [op.at for op in self.graph.ops if isinstance(op, InPlace) and op.target == target]
        if len(counts) != 1 or not (begins := self._begins(counts[0])):
            return False
        lines = range(begins, _where(counts[0])[0] + 1)
        root = name.split(".")[0]
        return not any(
            path[0] == root for op in self.graph.ops if _where(op.at)[0] in lines for path in uses(op)
        )

    def _may_be_all(self, bound: ast.expr, name: str) -> bool:
        """As many as the acquire, or the loop around it, was told to get; as many as there are."""
        if isinstance(bound, ast.Constant) and bound.value is None:
            return True
        match bound:
            case ast.Call(func=ast.Name(id="max"), args=[inner, ast.Constant(value=0)]):
                return self._may_be_all(inner, name)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=other)]):
                return not self._as_others_say(other, name)
            case ast.Call(func=ast.Name(id="min"), args=[bound, most]) if ast.unparse(most) == f"len({name})":
                return self._may_be_all(bound, name)
            case ast.BinOp(left=left, op=ast.FloorDiv() | ast.Sub(), right=ast.Constant()) if (
                ast.unparse(left) == f"len({name})"
            ):
                return False
        if any(isinstance(inner, ast.Call) for inner in walk(bound)):
            return True
        if self._may_stop_early(bound):
            return False
        return self._is_counted(bound) or self._is_told(bound, name)

    def _as_others_say(self, other: str, name: str) -> bool:
        """`accepted = self.verify(draft)`: as long as a function says that has not seen the list."""
        values = self._values(ast.Name(id=other))
        calls = [value.value if isinstance(value, ast.Await) else value for value in values]
        alike = {name}.union(*map(_names, _arguments(self._acquire))) - {"self"}
        return bool(calls) and all(_is_own_word(each) and not _names(each) & alike for each in calls)

    def _may_stop_early(self, bound: ast.expr) -> bool:
        """It is counted up in a loop that stops at the first which is not accepted."""
        target = (getattr(bound, "id", ""),)
        counts = [op.at for op in self.graph.ops if isinstance(op, InPlace) and op.target == target]
        return len(counts) == 1 and self._begins(counts[0]) in self._lines_of_doubt

    def _is_counted(self, bound: ast.expr) -> bool:
        """A name that is counted up, or is a loop's own: it may have come to the end."""
        if not isinstance(bound, ast.Name):
            return False
        loops = {op.target for op in self.graph.ops if isinstance(op, Next)}
        counts = [op.at for op in self.graph.ops if isinstance(op, InPlace) and op.target == (bound.id,)]
        if len(counts) == 1:
            return not self._is_behind_a_break(counts[0])
        return bool(counts) or (bound.id,) in loops

    def _is_behind_a_break(self, count: ast.AST) -> bool:
        """`if not self.send(page): break` above `sent += 1` in one loop: some were not sent."""
        breaks = [op.at for op in self.graph.ops if isinstance(op, Nop) and isinstance(op.at, ast.Break)]
        begins, line = self._begins(count), _where(count)[0]
        return any(begins == self._begins(at) and at.lineno < line for at in breaks)

    @cached_property
    def _lines_of_doubt(self) -> frozenset[int]:
        """`while n < len(rows) and accepts(rows[n]):` may stop at each."""
        asked: dict[int, set[str]] = {}
        for op in self.graph.ops:
            if isinstance(op, Assume) and not isinstance(op.at, ast.BoolOp):
                asked.setdefault(_where(op.at)[0], set()).add(op.key)
        return frozenset(
            line for line, keys in asked.items() if len(keys) > 1 and any("len(" in key for key in keys)
        )

    def _begins(self, inner: ast.AST) -> int:
        """The line of the loop around it: the last one before it that is indented less."""
        line, column = _where(inner)
        heads = [(*_where(op.at), len("for ")) for op in self.graph.ops if isinstance(op, Next)]
        heads += [(*_where(op.at), 0) for op in self.graph.ops if isinstance(op, Havoc)]
        return max((at for at, indented, to in heads if at < line and indented - to < column), default=0)

    def _is_told(self, bound: ast.expr, name: str) -> bool:
        values = self._values(bound)
        meant = {ast.dump(bound), *(ast.dump(value) for value in values if _number(value) != 0)}
        as_many = (_last_name(value) == "min" or ast.unparse(value) == f"len({name})" for value in values)
        if any(as_many):
            return True
        given = _arguments(self._acquire)
        given += [value for each in given for value in self._values(each)]
        told = {ast.dump(inner) for each in given for inner in walk(each)}
        return not meant.isdisjoint(told | self._counts) or self._compared(bound, name)

    def _compared(self, bound: ast.expr, name: str) -> bool:
        """`while len(found) > width:`."""
        written = ast.unparse(bound)
        return any(
            isinstance(op, Assume) and {"len", name.split(".")[0]} <= op.names and written in op.key
            for op in self.graph.ops
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
        calls = (at for at in calls if not portion_of(at) or not isinstance(at.args[0], ast.Name))
        calls = (at for at in calls if _last_name(at) != "min" or _last_name(at.args[-1]) != "len")
        return frozenset(ast.dump(inner) for at in calls for each in at.args for inner in walk(each))

    def _values(self, name: ast.expr) -> list[ast.expr]:
        """What is assigned to a name, as it is written."""
        return self._assigned.get(name.id, []) if isinstance(name, ast.Name) else []

    @cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = {}
        for op in self.graph.ops:
            match op:
                case (
                    EndStatement(at=ast.Assign(targets=[ast.Name(id=name)], value=value))
                    | Constant(at=ast.Assign(targets=[ast.Name(id=name)], value=value))
                ):
                    found.setdefault(name, []).append(value)
        return found


def _where(at: ast.AST) -> tuple[int, int]:
    return getattr(at, "lineno", 0), getattr(at, "col_offset", 0)


def is_number(part: str) -> bool:
    """`0` or `-1`, not a slice or a mask."""
    return part.lstrip("-").isdecimal()


def may_be_a_mask(part: str) -> bool:
    """Of numbers that lie in a tensor a name may choose many; `slots[winner]` of a list or a table is one."""
    return part.isidentifier()


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


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _last_name(node: ast.expr) -> str:
    callee = node.func if isinstance(node, ast.Call) else None
    return callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")


def _is_own_word(node: ast.expr) -> bool:
    """A function's, not that of an object made of what it is given."""
    name = _last_name(node)
    return isinstance(node, ast.Call) and name not in AS_MANY and not name[:1].isupper()


def _names(node: ast.expr) -> set[str]:
    return {inner.id for inner in walk(node) if isinstance(inner, ast.Name)}

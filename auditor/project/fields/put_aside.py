"""Records that a method takes out of its line, counts something for, and puts aside again: where there is no
room it ends the count first, `self.users.leave(job.model)`, and where the job is too large it does not. The
next time that it is the job's turn it is counted once more."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.effects import Handle
from auditor.flow.lease import Field, StoredField
from auditor.ir.calls import LOGGING
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Assume, Call
from auditor.project.code.bindings import assigned_by, given_to, own_attribute, root_of
from auditor.project.code.modules import Function, last_part
from auditor.project.fields.one_end_forgets import Known
from auditor.project.fields.ways_out import SAYING
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk

BACK = frozenset({"append", "appendleft", "insert", "add", "put", "put_nowait", "heappush"})
JOINING = frozenset({"extend", "extendleft", "update"})
OUT = frozenset({"pop", "popleft", "heappop", "get_nowait", "get"})


def put_aside(outcome: Outcome, known: Known) -> Iterator[StoredField]:
    """`known`: calls of a function that give back to the pool."""
    function, call, acquisition = outcome.function, outcome.call, outcome.acquisition
    counted = acquisition.keyed and acquisition.handle is Handle.ARGUMENT and not acquisition.foreign
    if not counted or function.cls is None or not call.args or not outcome.lease.releases:
        return
    key = call.args[0]
    record = root_of(key)
    lines = {*_taken_from(function, record)} if record else set()
    if not lines or _is_marked(function, call, record):
        return
    asides = {*_put_back(function, record, lines, call.lineno)}
    ending = {each for each in known(function) if each.args and ast.unparse(each.args[0]) == ast.unparse(key)}
    ways = (
        [_Ways(function.graph, call, aside, record) for aside in asides] if ending and len(asides) > 1 else []
    )
    ways = [way for way in ways if way.nodes]
    if any(way.comes_by(ending) for way in ways) and any(way.forgets(ending) for way in ways):
        field = Field(function.cls.qualname, ast.unparse(key).partition(".")[2] or record, record)
        yield StoredField(field, outcome.lease.span, partly_by=(function.qualname,))


class _Ways:
    """All ordinary ways from the acquire, where it was granted, to where the record is put aside."""

    def __init__(self, graph: Graph, call: ast.Call, aside: ast.Call, record: str) -> None:
        self.graph = graph
        self.record = record
        self.aside = aside
        ops = graph.ops
        starts = {node for node, op in enumerate(ops) if isinstance(op, Call) and op.at is call}
        ends = {node for node, op in enumerate(ops) if isinstance(op, Call) and op.at is aside}
        answers = {op.target for op in ops if isinstance(op, Call) and op.at is call}
        barred = {
            node
            for node, op in enumerate(ops)
            if getattr(op, "target", None) == (record,)
            or (isinstance(op, Assume) and op.subject in answers and op.says_absent)
        }
        self.nodes = self._between(starts, ends, barred)

    def _between(self, starts: Set[int], ends: Set[int], barred: Set[int]) -> set[int]:
        onward: dict[int, list[int]] = {}
        before: dict[int, list[int]] = {}
        for node, following in enumerate(self.graph.successors):
            for other, edge in following:
                if edge not in RAISING:
                    onward.setdefault(node, []).append(other)
                    before.setdefault(other, []).append(node)
        reached = _closure(starts, onward, barred | ends)
        return reached & _closure(ends & reached, before, barred | starts)

    def _calls(self) -> Iterator[ast.Call]:
        for node in self.nodes:
            op = self.graph.ops[node]
            if isinstance(op, Call):
                yield op.at

    def comes_by(self, ending: Set[ast.Call]) -> bool:
        return any(each in ending for each in self._calls())

    def forgets(self, ending: Set[ast.Call]) -> bool:
        """Nobody is told of the record on the way."""
        return not self.comes_by(ending) and not any(
            each is not self.aside and self._is_told(each) for each in self._calls()
        )

    def _is_told(self, call: ast.Call) -> bool:
        if last_part(call.func) in LOGGING | SAYING:
            return False
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        return any(isinstance(each, ast.Name) and each.id == self.record for each in (*given, receiver))


def _closure(starts: Set[int], onward: dict[int, list[int]], barred: Set[int]) -> set[int]:
    """The barred ones that are no starts are left out, or are where it ends if they were asked for."""
    seen, waiting = set(starts), list(starts)
    while waiting:
        for node in onward.get(waiting.pop(), ()):
            if node not in seen:
                seen.add(node)
                if node not in barred:
                    waiting.append(node)
    return seen


def _taken_from(function: Function, record: str) -> Iterator[str]:
    """`waiting` of `job = self.waiting.popleft()`, where it is given nothing else."""
    given = list(given_to(function, record))
    for value in given if len(given) == 1 else ():
        match value:
            case ast.Call(func=ast.Attribute(value=line, attr=way)) if way in OUT:
                pass
            case ast.Call(func=ast.Attribute(attr="heappop") | ast.Name(id="heappop"), args=[line, *_]):
                pass
            case _:
                continue
        if (field := own_attribute(line, function.owner or "")) is not None:
            yield field


def _is_marked(function: Function, call: ast.Call, record: str) -> bool:
    """`if not job.counted:` around the call or above it, of what the function sets."""
    stored = {
        node.attr
        for node in function.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node) == record
    }
    tests = (node.test for node in function.nodes if isinstance(node, ast.If | ast.While | ast.IfExp))
    return any(
        isinstance(part, ast.Attribute) and part.attr in stored and part.lineno <= call.lineno
        for test in tests
        for part in walk(test)
    )


def _put_back(function: Function, record: str, lines: Set[str], after: int) -> Iterator[ast.Call]:
    """`self.waiting.append(job)`, or `skipped.append(job)` of what joins those that wait further on."""
    own = function.owner or ""
    joining = {*_joining(function, lines, own)}
    for call in function.calls:
        told = call.args[-1] if call.args else None
        if last_part(call.func) not in BACK or getattr(told, "id", "") != record or call.lineno < after:
            continue
        into = call.args[0] if len(call.args) > 1 and last_part(call.func) == "heappush" else None
        into = call.func.value if into is None and isinstance(call.func, ast.Attribute) else into
        if into is not None and (own_attribute(into, own) in lines or getattr(into, "id", "") in joining):
            yield call


def _joining(function: Function, lines: Set[str], own: str) -> Iterator[str]:
    for call in function.calls:
        joins = isinstance(call.func, ast.Attribute) and call.func.attr in JOINING
        if joins and own_attribute(getattr(call.func, "value", call.func), own) in lines:
            yield from _names(call.args)
    for node in function.statements:
        for target, value in assigned_by(node):
            if own_attribute(target, own) in lines:
                yield from _names([value])
        if isinstance(node, ast.AugAssign) and own_attribute(node.target, own) in lines:
            yield from _names([node.value])


def _names(values: Sequence[ast.expr]) -> Iterator[str]:
    yield from (node.id for value in values for node in walk(value) if isinstance(node, ast.Name))

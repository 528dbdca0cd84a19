"""Records that stay in line with a lease on them: `admit()` looks at the first of those that wait, puts a row
on it, and leaves the loop where there is no page for it; its next turn puts another row over that.

    job = self.waiting[0]                         job = self.waiting.popleft()
    job.row = self.rows.take()                    job.row = self.rows.take()
    job.page = self.pages.take()                  if not self.fits(job):
    if job.page is None:                              self.waiting.appendleft(job)
        break                                         return
    self.waiting.popleft()"""

import ast
from collections.abc import Iterator, Set

from auditor.flow.lease import Field, StoredField
from auditor.ir.calls import LOGGING
from auditor.ir.ops import Assume, Call, Edge, Leave, Path, Store, Way
from auditor.project.code.bindings import assigned_by, awaited, given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.ways_out import SAYING
from auditor.project.outcome import Outcome, loses_normally
from auditor.source.nodes import walk

OUT = frozenset({"popleft", "pop", "remove", "get_nowait", "get"})
BACK = frozenset({"appendleft", "append", "insert", "put", "put_nowait"})


def left_in_line(outcome: Outcome, known: Set[ast.Call]) -> Iterator[StoredField]:
    """`known` are calls of the function that give back."""
    function, cls = outcome.function, outcome.function.cls
    if cls is None or outcome.acquisition.foreign or loses_normally(outcome.lease):
        return
    for record, field in _put_on(function, outcome.call):
        if _is_asked_before(function, record, field, outcome.call):
            continue
        for line, seen in _lines(function, record):
            place = (record, f".{field}")
            walker = _Walker(function, outcome.call, place, line, {id(call) for call in known})
            if walker.stays(seen=seen):
                where = Field(cls.qualname, field, record)
                yield StoredField(where, outcome.lease.span, partly_by=(function.qualname,))
                return


def _put_on(function: Function, call: ast.Call) -> Iterator[tuple[str, str]]:
    """`job` and `row` of `job.row = self.rows.take()`."""
    for statement in function.statements:
        for target, value in assigned_by(statement):
            match target:
                case ast.Attribute(value=ast.Name(id=record), attr=field) if record != function.owner:
                    if awaited(value) is call:
                        yield record, field


def _is_asked_before(function: Function, record: str, field: str, call: ast.Call) -> bool:
    """`if job.row is None:` above it, what is there stays there; or `if not job.started:` around it."""
    around = (node for node in function.of_kind(ast.If) if any(part is call for part in walk(node)))
    if any(isinstance(part, ast.Name) and part.id == record for node in around for part in walk(node.test)):
        return True
    return any(
        isinstance(node.ctx, ast.Load) and own_attribute(node, record) == field and node.lineno < call.lineno
        for node in function.of_kind(ast.Attribute)
    )


def _lines(function: Function, record: str) -> Iterator[tuple[str, bool]]:
    """`waiting` of `self.waiting[0]`, where it is only seen, and of `self.waiting.popleft()`."""
    own = function.owner or ""
    for value in given_to(function, record):
        match awaited(value):
            case ast.Subscript(value=line, slice=ast.Constant(value=0 | -1) | ast.UnaryOp()):
                seen = True
            case ast.Call(func=ast.Attribute(value=line, attr=way)) if way in OUT:
                seen = False
            case _:
                continue
        if (name := own_attribute(line, own)) is not None and (not seen or _takes_out(function, name)):
            yield name, seen


def _takes_out(function: Function, line: str) -> bool:
    """On the way on which it has all that it wants: from a mere list nobody is taken."""
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in OUT
        and own_attribute(call.func.value, function.owner or "") == line
        for call in function.calls
    )


class _Walker:
    """Follows the record from the call on, for as long as nobody else is given it."""

    def __init__(self, function: Function, call: ast.Call, place: Path, line: str, ends: Set[int]) -> None:
        self.graph = function.graph
        self.line = (function.owner or "", f".{line}")
        self.record, self.place = place[:1], place
        self.ends = ends
        self.site = {n for n, op in enumerate(self.graph.ops) if isinstance(op, Call) and op.at is call}

    def stays(self, *, seen: bool) -> bool:
        """Whether some way ends with the record in the line; at first it is there where it is only `seen`."""
        waiting = [
            (to, seen)
            for node in self.site
            for to, edge in self.graph.successors[node]
            if edge is Edge.NORMAL
        ]
        known: set[tuple[int, bool]] = set()
        while waiting:
            state = waiting.pop()
            if state in known:
                continue
            known.add(state)
            node, there = state
            op = self.graph.ops[node]
            if node in self.site or isinstance(op, Leave):
                if there and not (isinstance(op, Leave) and op.way is Way.RAISE):
                    return True
                continue
            after = self._after(node, there)
            if after is not None:
                onward = (
                    to
                    for to, edge in self.graph.successors[node]
                    if edge in (Edge.NORMAL, Edge.BODY, Edge.EXHAUSTED)
                )
                waiting += [(to, after) for to in onward]
        return False

    def _after(self, node: int, there: bool) -> bool | None:
        """None where it has gone elsewhere, or there was nothing to put on it, or it is given back."""
        op = self.graph.ops[node]
        if id(op.at) in self.ends:
            return None
        if isinstance(op, Assume) and op.says_absent and op.subject is not None:
            return None if op.subject == self.place else there
        if isinstance(op, Store) and (op.source == self.record or op.target[:1] == self.record):
            return there if op.target[:1] == self.record and op.source != self.record else None
        if not isinstance(op, Call) or op.method in LOGGING | SAYING:
            return there
        told = [path for path, _ in op.args] + [path for _, path in op.kwargs]
        if op.receiver == self.line:
            if op.method in BACK and self.record in told:
                return True
            return None if op.method in OUT | {"clear"} and there else there
        return None if self.record in told else there

"""Permits that stand for things in a line: `submit(job)` takes one and puts the job into a queue, and whoever
takes the job out leaves one when it is done. A job that is passed over, `if job.cancelled: continue`, or
whose failure is handled, takes its permit with it; so do those that a `clear()` throws away."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.effects import Handle
from auditor.flow.lease import Field, StoredField
from auditor.ir.calls import LOGGING
from auditor.ir.ops import ANY_ITEM, RAISING, Assume, Call, Edge, Leave, Way
from auditor.project.code.bindings import assignments, awaited, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.counts_at_ends import own_helpers
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.one_end_forgets import Known
from auditor.project.fields.ways_out import SAYING
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome, loses_normally
from auditor.project.shapes.name_bindings import FILLING

TAKING = frozenset({"get", "get_nowait", "popleft", "pop"})


def lost_in_line(outcome: Outcome, family: Sequence[Function], pools: Known) -> Iterator[StoredField]:
    """Where one line has such things, all of them from this function, and whoever takes one out leaves a
    permit on some of its ways. `pools` are the ends of the pool in the tree, if it is one."""
    filling, lease = outcome.function, outcome.lease

    def known(method: Function) -> Set[ast.Call]:
        return pools(method) | _released_by_itself(method, outcome.call)

    nameless = outcome.acquisition.handle is Handle.RECEIVER
    if not nameless or filling.cls is None or loses_normally(lease) or lease.releases or known(filling):
        return
    lines = set(_lines(filling, outcome.call.lineno))
    if len(lines) != 1:
        return
    (line,) = lines
    others = [each for each in family if each is not filling and each.name not in INITIAL]
    taking = {method: list(_taken(method, line)) for method in others if f".{line}" in method.text}
    enders = [method for method, taken in taking.items() if taken and _leaves(method, family, known)]
    fillers = [method for method in taking if set(_lines(method, 0)) & {line}]
    if not enders or any(method not in enders for method in fillers):
        return
    forgetting = [
        *(
            method
            for method in enders
            if any(_loses(method, *t, line, family, known) for t in taking[method])
        ),
        *(method for method in taking if _clears(method, line) and not _leaves(method, family, known)),
    ]
    if forgetting:
        field = Field(filling.cls.qualname, f"{line}{ANY_ITEM}")
        yield StoredField(field, lease.span, partly_by=(forgetting[0].qualname,))


def _released_by_itself(method: Function, acquire: ast.Call) -> Set[ast.Call]:
    """`self.credits.release()` of `self.credits.acquire()`."""
    asked = ast.unparse(acquire.func.value) if isinstance(acquire.func, ast.Attribute) else ""
    calls = (call for call in method.calls if last_name(call) == "release")
    return {call for call in calls if ast.unparse(getattr(call.func, "value", call)) == asked}


def _lines(method: Function, line: int) -> Iterator[str]:
    """`jobs` of `self.jobs.put(job)`, below the line."""
    for call in method.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=queue, attr=way), args=[ast.Name() | ast.Tuple()]) if (
                way in FILLING and call.lineno > line
            ):
                if (name := own_attribute(queue, method.owner or "")) is not None:
                    yield name


def _taken(method: Function, line: str) -> Iterator[tuple[ast.Call, str]]:
    """`job = self.jobs.get()`: the call, and the name."""
    for target, value in assignments(method):
        match target, awaited(value):
            case ast.Name(id=name), ast.Call(func=ast.Attribute(value=queue, attr=way)) as call if (
                way in TAKING
            ):
                if own_attribute(queue, method.owner or "") == line:
                    yield call, name


def _leaves(method: Function, family: Sequence[Function], known: Known) -> bool:
    return bool(_leaving(method, family, known))


def _leaving(method: Function, family: Sequence[Function], known: Known) -> set[int]:
    """The calls by which it leaves one, or asks a method of its own that does."""
    helpers = {each.name for each in own_helpers(method, family) if each is not method and known(each)}
    own = method.owner or ""
    asked = (call for call in method.calls if own_attribute(call.func, own) in helpers)
    return {id(call) for call in (*known(method), *asked)}


def _clears(method: Function, line: str) -> bool:
    """All of it is thrown away, and nothing ends that it might stand for."""
    cleared = any(
        last_name(call) == "clear"
        and own_attribute(getattr(call.func, "value", call), method.owner or "") == line
        for call in method.calls
    )
    return cleared and not any(looks_releasing(call) for call in method.calls if last_name(call) != "clear")


def _loses(
    method: Function, taken: ast.Call, name: str, line: str, family: Sequence[Function], known: Known
) -> bool:
    """Some way from there comes to the end, or to the next one, by no such call, and hands the thing to
    nobody who is not given it on the other ways as well."""
    walker = _Walker(method, taken, name, line, _leaving(method, family, known))
    return walker.loses()


class _Walker:
    def __init__(self, method: Function, taken: ast.Call, name: str, line: str, leaving: Set[int]) -> None:
        self.graph = method.graph
        self.own = method.owner or ""
        self.name = name
        self.line = line
        self.site = {n for n, op in enumerate(self.graph.ops) if isinstance(op, Call) and op.at is taken}
        self.ends = {
            n for n, op in enumerate(self.graph.ops) if id(op.at) in leaving and isinstance(op, Call)
        }
        self.before = self._coming_to_an_end()

    def loses(self) -> bool:
        seen: set[int] = set()
        waiting = [
            to for node in self.site for to, edge in self.graph.successors[node] if edge is Edge.NORMAL
        ]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            op = self.graph.ops[node]
            if node in self.site or (isinstance(op, Leave) and op.way is not Way.RAISE):
                return True
            if node in self.ends or isinstance(op, Leave) or self._is_elsewhere(node):
                continue
            waiting += [
                to for to, edge in self.graph.successors[node] if edge not in (Edge.CANCEL, Edge.CLOSE)
            ]
        return False

    def _is_elsewhere(self, node: int) -> bool:
        """There was nothing, or somebody has it: it goes back into the line, or to a call by which no permit
        is left behind."""
        op = self.graph.ops[node]
        if isinstance(op, Assume):
            return (
                op.value and self._says_what_it_is(op.at)
                if not op.says_absent
                else op.subject == (self.name,)
            )
        if not isinstance(op, Call) or op.method in LOGGING | SAYING:
            return False
        given = any(path == (self.name,) for path, _ in (*op.args, *((p, k) for k, p in op.kwargs)))
        return given and node not in self.before

    def _says_what_it_is(self, at: ast.AST) -> bool:
        """`job is STOP`, `isinstance(job, Stop)`"""
        match at:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.Eq()]):
                return name == self.name
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), _]):
                return name == self.name
        return False

    def _coming_to_an_end(self) -> set[int]:
        """Nodes from which a permit is left in the same turn, where nothing fails."""
        found = set(self.ends)
        grown = True
        while grown:
            grown = False
            for node, onward in enumerate(self.graph.successors):
                if node in found or node in self.site:
                    continue
                if any(to in found for to, edge in onward if edge not in RAISING):
                    found.add(node)
                    grown = True
        return found

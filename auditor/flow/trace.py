"""From a lost lease back to its acquire: the shortest path the solver found, told in steps."""

import ast
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeVar

from auditor.flow.operands import operands
from auditor.flow.solve import Solution
from auditor.ir.further_turns import FURTHER
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Assume, Call, Edge, Leave, Nop, Path, Way
from auditor.ir.turns import FLAG, OWN
from auditor.model import Span, Step
from auditor.source.nodes import walk


class Placed(Hashable, Protocol):
    """A state of an analysis that follows one object: where it is."""

    @property
    def places(self) -> frozenset[Path]: ...


State = TypeVar("State", bound=Placed)


@dataclass(frozen=True, slots=True)
class Station:
    """One node on the path and the edge on which it was left; `holds` if the node is a call that was given
    the lease."""

    node: int
    edge: Edge
    holds: bool = False
    uses: bool = False


Point = tuple[int, State]
Onward = dict[tuple[int, State], tuple[tuple[int, State], Edge] | None]


SETTING = frozenset({"settimeout", "setblocking", "setsockopt", "set_inheritable", "fileno", "getsockname"})
"""Options of a socket or a file: nobody expects these to fail."""


def shortest_path(graph: Graph, solution: Solution[State], node: int, held: State) -> list[Station]:
    """Stations from the first node after the acquire to `node`, which is left out; without exceptions if
    there is such a way."""
    end = (node, held)
    for avoided in (RAISING, RAISING - {Edge.RAISE}, frozenset[Edge]()):
        origin, onward = _search(solution, end, avoided)
        if origin is not None:
            break
    return _stations(graph, origin or end, onward)


def path_by_its_own_failure(
    graph: Graph, solution: Solution[State], node: int, held: State, is_harmless: Callable[[ast.Call], bool]
) -> list[Station] | None:
    """The shortest path on which nothing raises but what is done with the lease, and may; None if there is
    none."""

    def may_raise(at: Point[State]) -> bool:
        op = graph.ops[at[0]]
        return _may_fail(graph, *at) and not (isinstance(op, Call) and is_harmless(op.at))

    origin, onward = _search(solution, (node, held), frozenset(), may_raise)
    return _stations(graph, origin, onward) if origin is not None else None


def path_that_closes(graph: Graph, solution: Solution[State], node: int, held: State) -> list[Station] | None:
    """The shortest path on which nothing happens but that a generator is closed at its `yield`; None if there
    is none."""
    origin, onward = _search(solution, (node, held), RAISING - {Edge.CLOSE})
    return _stations(graph, origin, onward) if origin is not None else None


def path_by_what_is_raised(
    graph: Graph,
    solution: Solution[State],
    node: int,
    held: State,
    raising: ast.AST,
    leads_on: Callable[[ast.AST], bool],
) -> list[Station] | None:
    """The shortest path on which only `raising` fails, through what `leads_on` then; None if there is
    none."""

    def may_raise(at: Point[State]) -> bool:
        return graph.ops[at[0]].at is raising

    def passes(at: Point[State]) -> bool:
        return leads_on(graph.ops[at[0]].at)

    origin, onward = _search(solution, (node, held), frozenset(), may_raise, passes)
    return _stations(graph, origin, onward) if origin is not None else None


def _stations(graph: Graph, origin: Point[State], onward: Onward[State]) -> list[Station]:
    stations = []
    at = origin
    step = onward[at]
    while step is not None:
        stations.append(Station(at[0], step[1], *_given(graph, at[0], at[1])))
        at, step = step[0], onward[step[0]]
    return stations


def _search(
    solution: Solution[State],
    end: Point[State],
    avoided: frozenset[Edge],
    may_raise: Callable[[Point[State]], bool] | None = None,
    passes: Callable[[Point[State]], bool] | None = None,
) -> tuple[Point[State] | None, Onward[State]]:
    """Backwards from `end` to where the lease began; each point with the step that leads on from it."""
    onward: Onward[State] = {end: None}
    queue = deque([end])
    while queue:
        here = queue.popleft()
        before = solution.came_from.get(here, ())
        if here in solution.starts:
            return here, onward
        for earlier, state, edge in before:
            key = (earlier, state)
            if edge in RAISING and may_raise is not None and not may_raise(key):
                continue
            if passes is not None and not passes(key):
                continue
            if edge not in avoided and key not in onward:
                onward[key] = (here, edge)
                queue.append(key)
    return None, onward


def _may_fail(graph: Graph, node: int, held: Placed) -> bool:
    op = graph.ops[node]
    return not (isinstance(op, Call) and op.method in SETTING) and any(_given(graph, node, held))


def _given(graph: Graph, node: int, held: Placed) -> tuple[bool, bool]:
    op = graph.ops[node]
    if not isinstance(op, Call):
        return False, False
    roots = {place[0] for place in held.places}
    roots |= {made.target[0] for made in graph.captures() if not roots.isdisjoint(made.names)}
    given = {position for position, path in operands(op) if path[0] in roots}
    return bool(given - {-1}), -1 in given


def span_of(path: str, node: ast.AST, lines: Sequence[str]) -> Span:
    """Line and columns counted from 1, in characters (ast counts UTF-8 bytes)."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    end_line, end_column = (
        getattr(node, "end_lineno", line) or line,
        getattr(node, "end_col_offset", column) or column,
    )
    return Span(
        path,
        line,
        _characters(lines, line, column) + 1,
        end_line,
        _characters(lines, end_line, end_column) + 1,
    )


def _characters(lines: Sequence[str], line: int, column: int) -> int:
    text = lines[line - 1] if line <= len(lines) else ""
    return column if text.isascii() else len(text.encode()[:column].decode(errors="ignore"))


def tell(
    graph: Graph,
    path: str,
    stations: Iterable[Station],
    lines: Sequence[str],
    milestones: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[Step]:
    """The decisions taken on the way: branches, loops left, calls that raised; and what `milestones` say of
    their nodes."""
    told: set[int] = set()
    for station in stations:
        op = graph.ops[station.node]
        note = milestones.get(station.node) or _note(op, station.edge)
        if note is None or (isinstance(op, Assume) and _implied(op.at, told)):
            continue
        at = span_of(path, op.at, lines)
        yield Step(path, at.line, at.column, note)


def _implied(test: ast.AST, told: set[int]) -> bool:
    """A whole `a and b` says nothing new once the part that decided it was told. `told` takes it in."""
    parts = {id(node) for node in walk(test)} & told if isinstance(test, ast.BoolOp) else set()
    told -= parts
    told.add(id(test))
    return bool(parts)


def _note(op: object, edge: Edge) -> str | None:
    match op:
        case Assume(key=key) if key.startswith(FLAG):
            return "in the first turn" if op.value else "in a later turn"
        case Assume(key=key) if key.startswith((OWN, FURTHER)):
            return None
        case Assume(at=ast.Name(ctx=ast.Store()) | ast.Tuple(ctx=ast.Store())):
            return None  # what holds in the first turn, asked by nobody
        case Assume():
            return f"when {_asked(op)}"
        case Nop(at=ast.Continue()):
            return "goes on with the next turn"
        case Nop(at=ast.Break()):
            return "leaves the loop"
        case Leave(way=Way.RAISE):
            return None
    if edge is Edge.CALL_RAISES and isinstance(op, Call):
        return f"`{_short(op.at.func)}` may raise"
    if edge is Edge.CANCEL:
        return "may be cancelled here"
    if edge is Edge.CLOSE:
        return "the generator may be closed here"
    if edge is Edge.RAISE:
        return "raises here"
    return "may raise here" if edge in RAISING else None


def _asked(op: Assume) -> str:
    key = op.key
    if isinstance(op.at, ast.BoolOp) and not op.value:
        return f"`{key}` is false"
    if key.startswith("%"):
        text = _short(op.at)
        return f"`{text}`" if op.value else f"not `{text}`"
    if key.endswith(" is None") and not op.value:
        return f"`{key.removesuffix(' is None')} is not None`"
    return f"`{key}`" if op.value else f"not `{key}`"


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."

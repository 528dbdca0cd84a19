"""Collections of the caller's in which a lease is noted, and given back all the same on another way:

    except CalledProcessError:              except TimeoutExpired:
        bad.add(device)                         bad.add(device)
        give_back(device)                       return False
        return False

Whoever has the collection would give back for a second time what he found there: it only says which."""

from collections.abc import Container, Iterator, Set

from auditor.flow.follow import Followed
from auditor.flow.held import Held
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, RAISING, Call, Leave, Path, Way
from auditor.project.code.modules import Function


def only_noted(function: Function, followed: Followed) -> Iterator[tuple[int, Held]]:
    """The ways out on which nothing but such a collection has it. Not behind a statement that fills the
    collection on both ways: `out.append(row)`, and `pool.give(row)` where the row turned out to be no use."""
    graph, endings = function.graph, followed.endings
    notes = {
        place
        for node, held in endings.released.items()
        for place in held.places
        if _is_the_callers(function, place) and _goes_out(graph, node, place)
    }
    for node, place in endings.stored.items() if notes else ():
        alone = [
            at for at in _filling(graph, endings.written, place) if not _reach(graph, at, endings.released)
        ]
        if (
            place in notes
            and isinstance(graph.ops[node], Leave)
            and any(_reach(graph, at, {node}) for at in alone)
        ):
            states = followed.solution.states[node]
            yield from ((node, held) for held in states if _is_nowhere_else(held, notes))


def _filling(graph: Graph, written: Set[int], place: Path) -> list[int]:
    ops = ((node, graph.ops[node]) for node in sorted(written))
    return [node for node, op in ops if isinstance(op, Call) and op.receiver == place[:-1]]


def _reach(graph: Graph, start: int, wanted: Container[int]) -> bool:
    """On ordinary ways."""
    waiting, seen = [start], {start}
    while waiting:
        for after, edge in graph.successors[waiting.pop()]:
            if edge in RAISING or after in seen:
                continue
            if after in wanted:
                return True
            seen.add(after)
            waiting.append(after)
    return False


def _is_the_callers(function: Function, place: Path) -> bool:
    return place[0] in function.graph.parameters and place[0] != function.owner and place[-1] == ANY_ITEM


def _goes_out(graph: Graph, released: int, place: Path) -> bool:
    """On an ordinary way, with the collection as it is."""
    waiting, seen = [released], {released}
    while waiting:
        for after, edge in graph.successors[waiting.pop()]:
            op = graph.ops[after]
            if edge in RAISING or after in seen or (isinstance(op, Call) and op.receiver == place[:-1]):
                continue
            if isinstance(op, Leave):
                return op.way is not Way.RAISE
            seen.add(after)
            waiting.append(after)
    return False


def _is_nowhere_else(held: Held, notes: Set[Path]) -> bool:
    return all(place in notes or len(place) == 1 for place in held.places)

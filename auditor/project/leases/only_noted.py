"""Collections of the caller's in which a lease is noted, and given back all the same on another way:

    except CalledProcessError:              except TimeoutExpired:
        bad.add(device)                         bad.add(device)
        give_back(device)                       return False
        return False

Whoever has the collection would give back for a second time what he found there: it only says which."""

from collections.abc import Iterator, Set

from auditor.flow.follow import Followed
from auditor.flow.held import Held
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, RAISING, Call, Leave, Path
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
    for node, place in endings.stored.items():
        if place not in notes or not isinstance(graph.ops[node], Leave):
            continue
        behind = [set(_onward(graph, at)) for at in _filling(graph, endings.written, place)]
        if any(node in each and each.isdisjoint(endings.released) for each in behind):
            states = followed.solution.states[node]
            yield from ((node, held) for held in states if _is_nowhere_else(held, notes))


def _filling(graph: Graph, written: Set[int], place: Path) -> list[int]:
    ops = ((node, graph.ops[node]) for node in sorted(written))
    return [node for node, op in ops if isinstance(op, Call) and op.receiver == place[:-1]]


def _is_the_callers(function: Function, place: Path) -> bool:
    return place[0] in function.graph.parameters and place[0] != function.owner and place[-1] == ANY_ITEM


def _goes_out(graph: Graph, released: int, place: Path) -> bool:
    """On an ordinary way, with the collection as it is."""
    return any(isinstance(graph.ops[node], Leave) for node in _onward(graph, released, place[:-1]))


def _onward(graph: Graph, start: int, untouched: Path | None = None) -> Iterator[int]:
    """The nodes that ordinary ways come by from there, as long as nothing is asked of what is `untouched`."""
    waiting, seen = [start], {start}
    while waiting:
        for after, edge in graph.successors[waiting.pop()]:
            op = graph.ops[after]
            asked = isinstance(op, Call) and op.receiver is not None and op.receiver == untouched
            if edge not in RAISING and after not in seen and not asked:
                seen.add(after)
                waiting.append(after)
                yield after


def _is_nowhere_else(held: Held, notes: Set[Path]) -> bool:
    return all(place in notes or len(place) == 1 for place in held.places)

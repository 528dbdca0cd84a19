"""Keys that are noted somewhere and given back all the same: `engine.version = version`, and further down
`store.leave(version)`, whichever way is taken from there."""

from auditor.flow.effects import Acquisition, Effects, Fate
from auditor.flow.held import Places
from auditor.flow.operands import operands
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Call, Leave, Op


def ended_behind(graph: Graph, effects: Effects, acquisition: Acquisition, places: Places, node: int) -> bool:
    """Every way on from the node comes by a call that gives it back, unless something is raised."""
    waiting, seen = [node], {node}
    found = False
    while waiting:
        for after, edge in graph.successors[waiting.pop()]:
            op = graph.ops[after]
            if edge in RAISING or after in seen:
                continue
            seen.add(after)
            if isinstance(op, Leave):
                return False
            if _ends(effects, acquisition, places, op):
                found = True
            else:
                waiting.append(after)
    return found


def _ends(effects: Effects, acquisition: Acquisition, places: Places, op: Op) -> bool:
    if not isinstance(op, Call):
        return False
    given = ((position, path) for position, path in operands(op) if path in places)
    return any(
        effects.treatment(op, position, (), acquisition.value, acquisition.protocol).fate is Fate.RELEASE
        for position, _ in given
    )

"""Backward functions that leave early with what their forward put on the `ctx`: no gradient is wanted of one
input, which says nothing of what was borrowed for another."""

from collections.abc import Iterator

from auditor.flow.decisive import decisive
from auditor.flow.follow import Followed
from auditor.flow.held import Held
from auditor.flow.trace import shortest_path
from auditor.ir.ops import Assume, Leave, Way
from auditor.project.code.modules import Function

WANTED = ".needs_input_grad"
"""What torch tells of the inputs, forward and backward alike."""


def keeps_by_what_is_wanted(backward: Function, forward: Function, followed: Followed) -> bool:
    """It gives the lease back, but on ways on which it asks for nothing else; forward has not asked."""
    if not followed.endings.released or WANTED in forward.text:
        return False
    asked = [_asked(backward, followed, node, held) for node, held in _ways_out(backward, followed)]
    return bool(asked) and all(names and all(map(_is_what_is_wanted, names)) for names in asked)


def _is_what_is_wanted(names: frozenset[str]) -> bool:
    """`ctx.needs_input_grad[index]`, and no other field."""
    return {name for name in names if name.startswith(".")} == {WANTED}


def _ways_out(backward: Function, followed: Followed) -> Iterator[tuple[int, Held]]:
    """On which it is still there, without an exception."""
    ops = backward.graph.ops
    left = {node for node in followed.endings.stored if isinstance(ops[node], Leave)}
    for node in left | {node for _, node, _ in followed.endings.lost if isinstance(ops[node], Leave)}:
        op = ops[node]
        assert isinstance(op, Leave)
        for held in followed.solution.states[node] if op.way is not Way.RAISE else ():
            if held.places:
                yield node, held


def _asked(backward: Function, followed: Followed, node: int, held: Held) -> list[frozenset[str]]:
    """What the conditions ask that decide about it, each for itself."""
    graph = backward.graph
    path = decisive(
        graph, followed.solution, shortest_path(graph, followed.solution, node, held), [(node, held)]
    )
    return [op.names for station in path if isinstance(op := graph.ops[station.node], Assume)]

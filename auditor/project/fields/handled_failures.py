"""Entries of a container that a method loses where it handles a failure: a worker takes a job out of the
queue, `except OSError: log.error(...)`, `continue`, and gives back the job's slot behind that."""

import ast
from collections.abc import Iterator

from auditor.flow.follow import Followed
from auditor.flow.lease import Loss
from auditor.flow.trace import Station
from auditor.ir.calls import LOGGING
from auditor.ir.ops import RAISING, Leave, Path, Way
from auditor.project.code.modules import Function
from auditor.project.fields.ways_out import WayOut
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def lost_in_a_handler(
    method: Function, calm: Followed, followed: Followed, container: Path
) -> Iterator[ast.AST]:
    """Where such an entry was taken out; `calm` without, `followed` with the ways into handlers. What the
    handler looks at it may see to."""
    tries = [node for node in method.statements if isinstance(node, ast.Try)]
    if not (tries and calm.endings.released) or any(way.taken for way in _ways(method, calm, container)):
        return
    for way in _ways(method, followed, container):
        if way.taken is None:
            continue
        failing = _failing(way)
        around = [node for node in tries if _guards(node, way)]
        if len(failing) == 1 and around and not any(_may_see_to(each, way) for each in around):
            yield way.taken


def _ways(method: Function, followed: Followed, container: Path) -> Iterator[WayOut]:
    endings = followed.endings
    for loss, node, held in endings.lost:
        if loss is not Loss.RAISE and not _fails(method, node):
            yield WayOut(method, followed, node, held, container)
    for node in endings.stored:
        for held in followed.solution.states.get(node, ()):  # where it is left, or the next one gets its name
            at_hand = all(p[0].isidentifier() and p[0] not in method.parameters for p in held.places)
            if at_hand and not _fails(method, node):
                yield WayOut(method, followed, node, held, container)


def _fails(method: Function, node: int) -> bool:
    op = method.graph.ops[node]
    return isinstance(op, Leave) and op.way is Way.RAISE


def _guards(node: ast.Try, way: WayOut) -> bool:
    """What failed on the way stands in it, and what took the entry out does not."""
    inside = {id(part) for statement in node.body for part in walk(statement)}
    failed = [way.ops[station.node].at for station in _failing(way)]
    return all(id(at) in inside for at in failed) and id(way.taken) not in inside


def _failing(way: WayOut) -> list[Station]:
    """Shortest ways fail only where they must."""
    return [station for station in way.path if station.edge in RAISING]


def _may_see_to(node: ast.Try, way: WayOut) -> bool:
    """A handler, or the `finally`, speaks of the entry, and does not only log it."""
    names = {place[0] for place in way.held.places}
    parts = [each for part in (*node.handlers, *node.finalbody) for each in walk(part)]
    logs = (each for each in parts if isinstance(each, ast.Call) and last_name(each) in LOGGING)
    logged = {id(told) for call in logs for told in walk(call)}
    return any(isinstance(each, ast.Name) and each.id in names and id(each) not in logged for each in parts)

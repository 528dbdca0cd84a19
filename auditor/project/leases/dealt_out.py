"""Numbers that a loop gives each to whom it finds: that there were as many takers is not for us to prove."""

import ast
from collections.abc import Iterator

from auditor.flow.follow import Followed
from auditor.flow.knowledge import FILLING
from auditor.flow.places import begins_with
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Leave, Next, Op, Store
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import loops_around
from auditor.source.nodes import walk


def dealt_out(function: Function, site: int, followed: Followed) -> list[int]:
    """Lines on which that happens. A loop over the numbers themselves meets each: what it passes over is
    left."""
    graph, endings = function.graph, followed.endings
    around = loops_around(function, graph.ops[site].at)
    given = (
        graph.ops[node] for node in endings.written.union(endings.stored, endings.taken, endings.unknown)
    )
    return [*_in_portions(function, graph.ops[site].at, followed)] + [
        op.at.lineno
        for op in given
        if isinstance(op.at, (ast.expr, ast.stmt))
        and not isinstance(op, Leave)
        and (loops := loops_around(function, op.at) - around)
        and not _all_at_once(function, op.at)
        and not _is_told_each(op, followed)
        and not (_keeps(op) and any(_goes_over(graph, head, followed) for head in loops))
    ]


def _is_told_each(op: Op, followed: Followed) -> bool:
    """`launcher.spawn(rank, port)`: each is told the same one, under its own name."""
    held = (each for states in followed.solution.states.values() for each in states)
    names = {place[0] for each in held for place in each.places if len(place) == 1}
    told = [*op.at.args, *(each.value for each in op.at.keywords)] if isinstance(op, Call) else []
    plain = any(isinstance(each, ast.Name) and each.id in names for each in told)
    return plain and not _keeps(op)


def _all_at_once(function: Function, given: ast.AST) -> bool:
    """`run.pages.extend(pages)` and `return True`: the first one gets them all."""
    return any(
        isinstance(suite[-1], ast.Return) and any(given in list(walk(each)) for each in suite[:-1])
        for node in function.statements
        if isinstance(node, ast.If)
        for suite in (node.body, node.orelse)
        if suite
    )


def _in_portions(function: Function, site: ast.AST, followed: Followed) -> Iterator[int]:
    """The last lines of loops in which some turns keep the next few: `parts.append(fresh[at : at + n])`,
    `at += n`. How many that were was summed up before."""
    for loop in function.nodes:
        if not isinstance(loop, (ast.For, ast.While)) or site in (within := list(walk(loop))):
            continue
        moving = {
            each.target.id
            for each in within
            if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name)
        }
        names = {name for each in within for name in _portion_kept(each, moving)} if moving else set()
        if names and any(
            (name,) in held.places
            for states in followed.solution.states.values()
            for held in states
            for name in names
        ):
            yield loop.end_lineno or loop.lineno


def _portion_kept(node: ast.AST, moving: set[str]) -> Iterator[str]:
    match node:
        case (
            ast.Call(func=ast.Attribute(attr="append"), args=[kept])
            | ast.Assign(targets=[ast.Subscript() | ast.Attribute()], value=kept)
        ):
            match kept:
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Slice(lower=ast.Name(id=start))):
                    if start in moving:
                        yield name


def _keeps(op: Op) -> bool:
    """The thing itself, not what it holds."""
    return isinstance(op, Store) or (isinstance(op, Call) and op.method in FILLING)


def _goes_over(graph: Graph, head: int, followed: Followed) -> bool:
    """Whether what the loop yields is the lease."""
    loop = graph.ops[head]
    element = loop.element if isinstance(loop, Next) else None
    places = (place for held in followed.solution.states.get(head, ()) for place in held.places)
    return element is not None and any(begins_with(place, element) for place in places)

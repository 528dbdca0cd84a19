"""Whether a function may come to its end without a look at a callback that it was told:

def run_with(job, on_done):
    if job is None:
        return
    job()
    on_done()"""

import ast

from auditor.ir.ops import RAISING, Assume, Call, Capture, Edge, Leave, Way
from auditor.project.code.bindings import is_dropped
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def nobody_asks(function: Function, call: ast.Call) -> bool:
    """What the call answers: it may say there whether it has done it."""
    turns = (node.iter for node in function.statements if isinstance(node, ast.For | ast.AsyncFor))
    return is_dropped(function, call) or any(each is call for each in turns)


def may_end_without(target: Function, parameter: str) -> bool:
    """On a way on which nothing fails, or a handler goes on. What puts it somewhere, or hands it on, has seen
    to it; where there is none, there is nothing to be called. The other ways have to speak of it."""
    asking = (node for node in target.nodes if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert))
    asked = {id(part) for node in asking for part in walk(node.test)}
    spoken = any(
        node.id == parameter and isinstance(node.ctx, ast.Load) and id(node) not in asked
        for node in target.of_kind(ast.Name)
    )
    return spoken and not target.is_abstract and _some_way_leaves(target, parameter)


def _some_way_leaves(target: Function, parameter: str) -> bool:
    graph, seen, waiting = target.graph, {0}, [0]
    while waiting:
        node = waiting.pop()
        op = graph.ops[node]
        if isinstance(op, Leave):
            if op.way is not Way.RAISE:
                return True
            continue
        if isinstance(op, Assume):
            if op.subject == (parameter,) and op.says_absent:
                continue
        elif isinstance(op, Capture):
            if parameter in op.names:
                continue
        elif _speaks(op.at, parameter) and not _is_compound(op.at):
            continue
        for to, edge in graph.successors[node]:
            if to not in seen and (
                edge not in RAISING or (edge is Edge.CALL_RAISES and isinstance(op, Call))
            ):
                seen.add(to)
                waiting.append(to)
    return False


def _speaks(at: ast.AST | None, parameter: str) -> bool:
    return at is not None and any(
        isinstance(node, ast.Name) and node.id == parameter and isinstance(node.ctx, ast.Load)
        for node in walk(at)
    )


def _is_compound(at: ast.AST | None) -> bool:
    """Its parts come by themselves."""
    return isinstance(at, ast.stmt) and hasattr(at, "body")

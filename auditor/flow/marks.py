"""Loops over what was put into a list later than the lease: `known = len(table)` behind the loop that pins
pages and lists them, `for page in table[known:]` further on. Of those pinned there is none among them."""

import re

from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Delete, InPlace, Move, Next, Path, Store

BEHIND = re.compile(r"(\w+):")
GROWING = frozenset({"append", "extend"})


def begins_behind(graph: Graph, site: int, loop: Next) -> bool:
    """Whether it goes over the part of a list behind a mark that was set when the lease was in it."""
    named = BEHIND.fullmatch(loop.part)
    if named is None or site < 0 or len(loop.source) != 2:
        return False
    whole, mark = loop.source[:1], (named[1],)
    set_at = [node for node, op in enumerate(graph.ops) if getattr(op, "target", None) == mark]
    if len(set_at) != 1 or not _only_grows(graph, whole):
        return False
    op = graph.ops[set_at[0]]
    measured = isinstance(op, Move) and op.source in _lengths(graph, whole)
    return measured and not _leads_to(graph, set_at[0], site)


def _lengths(graph: Graph, whole: Path) -> set[Path]:
    """Results of `len(table)`."""
    calls = (op for op in graph.ops if isinstance(op, Call) and op.method == "len" and op.receiver is None)
    return {op.target for op in calls if [path for path, _ in op.args] == [whole]}


def _only_grows(graph: Graph, whole: Path) -> bool:
    """At its end: nothing in it changes its place, and it is the same list all the time."""
    if sum(getattr(op, "target", None) == whole for op in graph.ops) != 1:
        return False
    for op in graph.ops:
        match op:
            case Call(receiver=receiver, method=method) if receiver == whole and method not in GROWING:
                return False
            case Store(target=target) | Delete(target=target) | InPlace(target=target) if target[:1] == whole:
                return False
    return True


def _leads_to(graph: Graph, start: int, end: int) -> bool:
    pending, seen = [start], {start}
    while pending:
        for following, _ in graph.successors[pending.pop()]:
            if following == end:
                return True
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return False

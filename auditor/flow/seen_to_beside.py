"""Signs that somebody sees to a lease though this function does not: what only *perhaps* leads to it."""

from collections.abc import Iterator

from auditor.flow.operands import operands, uses
from auditor.flow.places import begins_with
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Path, Store
from auditor.protocols.vocabulary import ACQUIRE_WORDS, split


def is_seen_to_beside(graph: Graph, site: int, places: frozenset[Path]) -> bool:
    """What lay at these places may still be ended. The function is named as one that hands on what it takes,
    `alloc_extend`; an object is made of parts of it, `Proxy(lease.start)`; the pool is told of it again,
    `manager.unpin(block)`, whatever that does; or what the acquire was told is written down for a later
    call, `self._by_request[rid] = name`."""
    acquire = graph.ops[site]
    assert isinstance(acquire, Call)
    given = [*_made_of(graph), *_told_again(graph, acquire)]
    within = any(begins_with(one, other) for g in given for p in places for one, other in ((g, p), (p, g)))
    return within or _hands_on(graph) or _writes_down(graph, acquire)


def _hands_on(graph: Graph) -> bool:
    name = getattr(graph.ops[0].at, "name", "")
    return not ACQUIRE_WORDS.isdisjoint(split(name)[:2])


def _writes_down(graph: Graph, acquire: Call) -> bool:
    told = {path for _, path in operands(acquire) if path != acquire.receiver}
    return any(isinstance(op, Store) and len(op.target) > 1 and op.source in told for op in graph.ops)


def _made_of(graph: Graph) -> Iterator[Path]:
    """What classes are given where objects of them are made."""
    for op in graph.ops:
        if isinstance(op, Call) and op.callee is not None and op.callee[-1].lstrip("._")[:1].isupper():
            yield from (operand for position, operand in operands(op) if position != -1)


def _told_again(graph: Graph, acquire: Call) -> Iterator[Path]:
    """What the pool is given by other calls whose answer nobody uses."""
    if acquire.receiver is None:
        return
    used = {path for op in graph.ops for path in uses(op)}
    for op in graph.ops:
        if not isinstance(op, Call) or op is acquire or op.target in used:
            continue
        if op.receiver == acquire.receiver:
            yield from (operand for position, operand in operands(op) if position != -1)

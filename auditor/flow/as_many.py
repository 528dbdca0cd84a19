"""Lists with an entry for each of another: `results = await gather(*(send(c) for c in chunks))`."""

import ast

from auditor.ir.graph import Graph
from auditor.ir.ops import Await, Call, Make, Move, Next, Path, is_temporary

EACH = frozenset({"gather", "list", "tuple", "sorted", "reversed", "enumerate"})
"""Functions whose results are as many as what they are told."""


def as_many(graph: Graph, lists: frozenset[Path]) -> frozenset[Path]:
    """Names of such, the lists included; of those that are given something else as well nothing is known."""
    loops = {id(op.at): op.source for op in graph.ops if isinstance(op, Next)}
    found = set(lists)
    for op in graph.ops:
        match op:
            case Make(at=ast.ListComp(generators=[each]) | ast.GeneratorExp(generators=[each])):
                known = not each.ifs and loops.get(id(each.target)) in found
            case Move(source=source) | Await(source=source):
                known = source in found and not getattr(op, "part", "")
            case Call(method=method, callee=callee, args=[(first, starred)]):
                named = method or (callee[-1].lstrip(".@") if callee else "")
                known = named in EACH and starred is (named == "gather") and first in found
            case _:
                continue
        if known and (is_temporary(op.target) or written(graph, op.target) == 1):
            found.add(op.target)
    return frozenset(found)


def written(graph: Graph, name: Path) -> int:
    """How often; what a comprehension is called inside is forgotten at its end."""
    if "~" in name[0]:
        return 1
    return sum(getattr(op, "target", None) == name for op in graph.ops)

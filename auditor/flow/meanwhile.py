"""What others may have done while one waits: `if key in self.tasks: return`, `session = await pool.take()`,
and `if key in self.tasks: return` once more, of a table that the function then fills. A lock that is entered
again is such a wait."""

import re

from auditor.flow.clauses import Fact
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, Await, Call, Enter, Op, Store

PUTTING = frozenset({"add", "append", "setdefault"})

TABLE = re.compile(r"[\w.]+ in (\w+)\.(\w+)")
"""The condition of `key in self.tasks`."""

LOCK = re.compile(r"lock|mutex|cond|guard", re.IGNORECASE)


def waits(op: Op) -> bool:
    """Whether others may run before it is done."""
    return isinstance(op, Await) or (isinstance(op, Enter) and LOCK.search(op.context[-1]) is not None)


def still_known(graph: Graph, known: frozenset[Fact]) -> frozenset[Fact]:
    """Without what was not in such a table before."""
    asked = {fact: TABLE.fullmatch(fact[0]) for fact in known if " in " in fact[0] and not fact[1]}
    if not any(asked.values()):
        return known
    filled = _filled(graph)
    gone = {fact for fact, found in asked.items() if found and (found[1], f".{found[2]}") in filled}
    return known - gone


def _filled(graph: Graph) -> set[tuple[str, ...]]:
    """Tables that the function puts something into."""
    found: set[tuple[str, ...]] = set()
    for op in graph.ops:
        match op:
            case Store(target=(owner, field, last)) if last == ANY_ITEM:
                found.add((owner, field))
            case Call(receiver=(owner, field), method=method) if method in PUTTING:
                found.add((owner, field))
    return found

"""Leases that somebody unknown is told of before the function keeps them itself: `disk.pwrite(data, slot)`
and `self.fresh[key] = slot`, `sock.send(("expect", key, pages))` and `self.waiting[key] = pages`.

Who was told had only borrowed them, unless something is started or scheduled with them."""

from auditor.flow.asked_first import leading_to
from auditor.flow.effects import Value
from auditor.flow.held import Held
from auditor.flow.lease import EXCEPTIONAL
from auditor.flow.ownership import Ownership
from auditor.flow.solve import Solution
from auditor.ir.ops import Call
from auditor.protocols.vocabulary import KEEPING, STORING, split

SENDING = frozenset(
    {"send", "sendall", "send_json", "send_string", "send_multipart", "send_pyobj", "send_text"}
)
"""Methods of sockets: numbers are copied."""

SCHEDULING = frozenset({"submit", "run", "start", "spawn", "create", "ensure", "call", "apply", "launch",
                        "schedule", "enqueue", "on", "add", "register", "callback", "notify", "dispatch",
                        "emit", "give", "hand"})  # fmt: skip
"""Words of what has something done later, or by somebody else."""


def only_told(domain: Ownership, solution: Solution[Held]) -> frozenset[int]:
    """Such calls, of which every way goes on to where the lease is kept in a field."""
    endings, graph = domain.endings, domain.graph
    told = {node for node in domain.trusting if _only_tells(domain, node)}
    lost = any(loss not in EXCEPTIONAL for loss, _, _ in endings.lost)
    if not told or lost or not endings.stored:
        return frozenset()
    own = {node for node, place in endings.stored.items() if place[:1] and place[0] in graph.parameters}
    keeping = ((node, held) for node in own for held in solution.states.get(node, ()))
    return frozenset(told & {node for node, _ in leading_to(solution, keeping)})


def _only_tells(domain: Ownership, node: int) -> bool:
    op = domain.graph.ops[node]
    if not isinstance(op, Call) or op.receiver is None:
        return False
    if op.method in SENDING:
        return domain.acquisition.value is Value.INDEX
    keeps = op.method in STORING or KEEPING.match(op.method) is not None
    return not keeps and SCHEDULING.isdisjoint(split(op.method))

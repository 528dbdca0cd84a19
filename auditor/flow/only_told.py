"""Numbers that are told to somebody far away, `sock.send(("expect", key, pages))`, before the function keeps
them itself: what goes over the wire is a copy."""

from auditor.flow.asked_first import leading_to
from auditor.flow.effects import Value
from auditor.flow.held import Held
from auditor.flow.lease import EXCEPTIONAL
from auditor.flow.ownership import Ownership
from auditor.flow.solve import Solution
from auditor.ir.ops import Call

SENDING = frozenset(
    {"send", "sendall", "send_json", "send_string", "send_multipart", "send_pyobj", "send_text"}
)
"""Methods of sockets; what a queue is `put` or a pool `submit`s runs here, and may give it back."""


def only_told(domain: Ownership, solution: Solution[Held]) -> frozenset[int]:
    """Such calls, of which every way goes on to where the lease is kept in a field."""
    endings, graph = domain.endings, domain.graph
    sent = {node for node in domain.trusting if _sends(domain, node)}
    lost = any(loss not in EXCEPTIONAL for loss, _, _ in endings.lost)
    if not sent or lost or not endings.stored:
        return frozenset()
    own = {node for node, place in endings.stored.items() if place[:1] and place[0] in graph.parameters}
    keeping = ((node, held) for node in own for held in solution.states.get(node, ()))
    return frozenset(sent & {node for node, _ in leading_to(solution, keeping)})


def _sends(domain: Ownership, node: int) -> bool:
    op = domain.graph.ops[node]
    numbers = domain.acquisition.value is Value.INDEX
    return numbers and isinstance(op, Call) and op.method in SENDING

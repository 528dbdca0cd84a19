"""Numbers that are sent to somebody, `sock.send(pages)`, and come back by what he says: `done(pages)` gives
back what it is told, or has received. The table that they lie in only says who has them."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.only_told import SENDING
from auditor.project.code.bindings import assignments, root_of
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk

RECEIVING = frozenset(
    {"recv", "recv_json", "recv_string", "recv_multipart", "recv_pyobj", "receive", "loads"}
)


def comes_back_by_word(outcome: Outcome, family: Sequence[Function], ends: Set[str]) -> bool:
    """`ends`: names of what gives back to its pool."""
    if not any(last_name(call) in SENDING for call in outcome.function.calls):
        return False
    return any(
        root_of(given) in {*method.parameters[1:], *_received(method)}
        for method in family
        if method is not outcome.function
        for call in method.calls
        if last_name(call) in ends
        for given in call.args
    )


def _received(method: Function) -> Iterator[str]:
    for target, value in assignments(method):
        if any(isinstance(node, ast.Call) and last_name(node) in RECEIVING for node in walk(value)):
            yield from (node.id for node in walk(target) if isinstance(node, ast.Name))

"""Callers that know of a lease in a field, and call the method that puts another one there:

def snooze(self, ticks):
    if self.cell is not None:
        self.arm(self.cell.due + ticks)"""

import ast
from collections.abc import Sequence, Set

from auditor.flow.follow import known_at_nodes
from auditor.ir.ops import Call
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.filling_again import Filling
from auditor.project.meaning.sites import last_name


def refilled_by_who_knows(filling: Filling, ending: Set[str], family: Sequence[Function]) -> bool:
    """And do no more with it than to ask for what it says."""
    return filling.key is None and any(
        _knows_and_refills(caller, filling, ending, family)
        for caller in family
        if caller is not filling.method and f"{filling.method.name}(" in caller.text
    )


def _knows_and_refills(
    caller: Function, filling: Filling, ending: Set[str], family: Sequence[Function]
) -> bool:
    own = caller.owner or ""
    graph = caller.graph
    calls = [
        at
        for at, op in enumerate(graph.ops)
        if isinstance(op, Call)
        and op.method == filling.method.name
        and isinstance(op.at, ast.Call)
        and own_attribute(op.at.func, own) is not None
    ]
    known = known_at_nodes(graph) if calls else {}
    fact = (f"{own}.{filling.field} is None", False)
    sure = any(at in known and fact in known[at] for at in calls)
    others = [call for call in caller.calls if last_name(call) != filling.method.name]
    return (
        sure
        and _only_reads(caller, filling)
        and not any(_may_end(call, ending, family, filling, own) for call in others)
    )


def _only_reads(caller: Function, filling: Filling) -> bool:
    """`self.cell.due`, and whether it is there."""
    own = caller.owner or ""
    calls = {id(call.func) for call in caller.calls}
    asked = {
        id(node.left)
        for node in caller.nodes
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)
    }
    read = {
        id(node.value)
        for node in caller.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in calls
    }
    its = (node for node in caller.nodes if isinstance(node, ast.Attribute))
    return all(
        isinstance(node.ctx, ast.Load) and id(node) in asked | read
        for node in its
        if own_attribute(node, own) == filling.field
    )


def _may_end(
    call: ast.Call, ending: Set[str], family: Sequence[Function], filling: Filling, own: str
) -> bool:
    helper = own_attribute(call.func, own)
    speaks = any(each.name == helper and f".{filling.field}" in each.text for each in family)
    told = any(isinstance(each, ast.Name) and each.id == own for each in call.args)
    return speaks or told or last_name(call) in ending or looks_releasing(call)

"""Callers that know of a lease in a field, and call the method that puts another one there:

def snooze(self, ticks):
    if self.cell is not None:
        self.arm(self.cell.due + ticks)

And callers of whom one makes room in the table first, and another does not:

def sync(self, key):
    if key in self.live:
        self.pool.put(self.live.pop(key))
    self.launch(key)

def add(self, key):
    self.launch(key)"""

import ast
from collections.abc import Sequence, Set

from auditor.flow.follow import known_at_nodes
from auditor.ir.ops import Call
from auditor.project.code.bindings import own_attribute, suites_of
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.filling_again import Filling
from auditor.project.fields.forgetting import INITIAL
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def refilled_by_who_knows(filling: Filling, ending: Set[str], family: Sequence[Function]) -> bool:
    """And do no more with it than to ask for what it says."""
    return filling.key is None and any(
        _knows_and_refills(caller, filling, ending, family)
        for caller in family
        if caller is not filling.method and f"{filling.method.name}(" in caller.text
    )


def refilled_for_each(filling: Filling, ending: Set[str], family: Sequence[Function]) -> bool:
    """`for size in list(self.graphs): self.capture(size)`, of a caller that says no more of the table."""
    return isinstance(filling.key, ast.Name) and any(
        _goes_over_and_refills(caller, filling, ending)
        for caller in family
        if caller is not filling.method and f"{filling.method.name}(" in caller.text
    )


def _goes_over_and_refills(caller: Function, filling: Filling, ending: Set[str]) -> bool:
    own, key = caller.owner or "", getattr(filling.key, "id", "")
    told = filling.method.parameters[1:]
    spoken = [n for n in caller.of_kind(ast.Attribute) if own_attribute(n, own) == filling.field]
    if key not in told or len(spoken) != 1:
        return False
    at = told.index(key)
    for loop in caller.of_kind(ast.For):
        over = loop.iter.args[0] if isinstance(loop.iter, ast.Call) and loop.iter.args else loop.iter
        match over:
            case ast.Call(func=ast.Attribute(value=over, attr="keys"), args=[]):
                pass
        if own_attribute(over, own) != filling.field or not isinstance(loop.target, ast.Name):
            continue
        calls = [node for each in loop.body for node in walk(each) if isinstance(node, ast.Call)]
        again = any(
            own_attribute(call.func, own) == filling.method.name
            and getattr(next(iter(call.args[at : at + 1]), None), "id", "") == loop.target.id
            for call in calls
        )
        if again and not any(last_name(call) in ending or looks_releasing(call) for call in caller.calls):
            return True
    return False


def made_room_for_by_one(filling: Filling, family: Sequence[Function]) -> bool:
    """Who takes out what lies there before he has another one put there knows that it may."""
    callers = [
        each
        for each in family
        if each is not filling.method
        and each.name not in INITIAL
        and any(own_attribute(call.func, each.owner or "") == filling.method.name for call in each.calls)
    ]
    making_room = [each for each in callers if _takes_out_before(each, filling)]
    return bool(making_room) and any(f".{filling.field}" not in each.text for each in callers)


def _takes_out_before(caller: Function, filling: Filling) -> bool:
    """Where it has asked whether there is one under that key."""
    own = caller.owner or ""
    for suite in suites_of(caller.node):
        for at, statement in enumerate(suite):
            asked = isinstance(statement, ast.If) and any(
                isinstance(node, ast.Compare)
                and isinstance(node.ops[0], ast.In)
                and own_attribute(node.comparators[0], own) == filling.field
                for node in walk(statement.test)
            )
            if asked and _takes_out_in(statement, own, filling.field):
                later = (node for each in suite[at + 1 :] for node in walk(each))
                calls = (node for node in later if isinstance(node, ast.Call))
                if any(own_attribute(call.func, own) == filling.method.name for call in calls):
                    return True
    return False


def _takes_out_in(statement: ast.stmt, own: str, field: str) -> bool:
    """`self.live.pop(key)`, `del self.live[key]`"""
    for node in walk(statement):
        match node:
            case (
                ast.Call(func=ast.Attribute(value=table, attr="pop"))
                | ast.Delete(targets=[ast.Subscript(value=table)])
            ):
                if own_attribute(table, own) == field:
                    return True
    return False


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

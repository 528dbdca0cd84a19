"""Callers of a method that puts a lease over another one, and end what is there themselves, hand it on, or
have made sure that there is none."""

import ast
import re
from collections.abc import Sequence, Set

from auditor.flow.follow import known_at_nodes
from auditor.ir.ops import Call
from auditor.project.code.modules import Function
from auditor.project.code.scripts import ends_before_another, is_of_another_class, is_script
from auditor.project.fields.filling_again import Filling
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.in_others import Uses
from auditor.project.fields.round_after_round import comes_after_all_rounds
from auditor.project.meaning.sites import last_name


def sees_to_it(caller: Function, filling: Filling, ending: Set[str]) -> bool:
    """`ending` are what the ends of what is there are called."""
    method = filling.method
    told = [
        call
        for call in caller.calls
        if last_name(call) == method.name and _fits(call, method)
        if not is_of_another_class(caller, call, method)
    ]
    if not told:
        return False
    if is_script(caller):
        return ends_before_another(caller, method.name, ending)
    uses = Uses(caller, works=frozenset({"append", "extend"}))
    keyed = filling.key is not None and not _is_a_position(filling.key)
    ends = [call for call in caller.calls if last_name(call) in ending]
    reads = [
        node
        for node in caller.own_nodes
        if isinstance(node, ast.Attribute) and node.attr == filling.field and isinstance(node.ctx, ast.Load)
    ]
    return (
        caller.name in INITIAL
        or any(not comes_after_all_rounds(caller, told, end) for end in ends)
        or any(keyed or not uses.is_worked_with(node) for node in reads)
        or (bool(reads) and _has_found_none(caller, told, filling.field))
    )


def _is_a_position(key: ast.expr) -> bool:
    """`pages[-1]`"""
    inner = key.operand if isinstance(key, ast.UnaryOp) else key
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int)


def _has_found_none(caller: Function, told: Sequence[ast.Call], field: str) -> bool:
    """`if self.file is None: self.reopen()`."""
    graph = caller.graph
    known = known_at_nodes(graph)
    facts = {
        fact
        for node, op in enumerate(graph.ops)
        if isinstance(op, Call) and op.at in told
        for fact in known.get(node, ())
    }
    none = re.compile(rf"\w+\.{field}(?P<is_none> is None)?")
    return any(
        (found := none.fullmatch(key)) is not None and bool(found["is_none"]) is truth for key, truth in facts
    )


def _fits(call: ast.Call, method: Function) -> bool:
    """By the number of its arguments: `tokens.extend(more)` is no call of `extend(self, request, token)`."""
    args = method.node.args if not isinstance(method.node, ast.Module) else None
    if args is None or args.vararg or args.kwarg or any(isinstance(each, ast.Starred) for each in call.args):
        return True
    most = len(method.parameters) - (method.owner is not None) + len(args.kwonlyargs)
    told = len(call.args) + len(call.keywords)
    return most - len(args.defaults) - len(args.kwonlyargs) <= told <= most or any(
        each.arg is None for each in call.keywords
    )

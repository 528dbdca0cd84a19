"""Callers of a method that puts a lease over another one, and end what is there themselves, hand it on, or
have made sure that there is none."""

import ast
import re
from collections.abc import Sequence, Set

from auditor.flow.follow import known_at_nodes
from auditor.ir.ops import Call
from auditor.project.code.bindings import assignments, root_of
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
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

    def only_looks(table: ast.expr) -> bool:
        return caller.name not in ending and _goes_over_them(caller, told, table)

    return (
        caller.name in INITIAL
        or any(not comes_after_all_rounds(caller, told, end) for end in ends)
        or any(
            (keyed and (caller.name in ending or not _goes_over_them(caller, told, node)))
            or not (keyed or uses.is_worked_with(node))
            for node in reads
        )
        or (bool(reads) and _has_found_none(caller, told, filling.field))
    )


def _goes_over_them(caller: Function, told: Sequence[ast.Call], table: ast.expr) -> bool:
    """`for at, state in enumerate(self.states):`, of which it only asks what they say before it tells the
    number of one that is there."""
    for loop in caller.statements:
        match loop:
            case ast.For(
                target=ast.Tuple(elts=[ast.Name(id=key), ast.Name(id=entry)]),
                iter=ast.Call(func=ast.Name(id="enumerate"), args=[over])
                | ast.Call(func=ast.Attribute(value=over, attr="items"))
                | ast.Call(
                    func=ast.Name(id="list"), args=[ast.Call(func=ast.Attribute(value=over, attr="items"))]
                ),
            ) if over is table:
                its = all(any(getattr(each, "id", "") == key for each in call.args) for call in told)
                return its and _is_only_read(caller, entry)
    return False


def _is_only_read(caller: Function, name: str) -> bool:
    """Nothing is done to its fields, none gets a name of its own, and no call is one that ends things."""
    read = {id(node.value) for node in caller.nodes if isinstance(node, ast.Attribute) and _is_load(node)}
    loads = (n for n in caller.nodes if isinstance(n, ast.Name) and n.id == name and _is_load(n))
    ending = any(looks_releasing(call) or _is_of(call.func, name) for call in caller.calls)
    given = any(root_of(value) == name for _, value in assignments(caller))
    return not (ending or given) and all(id(node) in read for node in loads)


def _is_of(called: ast.expr, name: str) -> bool:
    return isinstance(called, ast.Attribute) and root_of(called) == name


def _is_load(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


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

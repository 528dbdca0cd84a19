"""Whether what is noted in a field may be ended by whoever has to do with the field: names of adapters that
lie in `self.active` are no way to their counts where nobody who knows of `active` ever lowers one."""

import ast
from collections.abc import Iterator

from auditor.ir.calls import LOGGING
from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

NOTING = frozenset(
    {"append", "add", "discard", "remove", "pop", "get", "list", "sorted", "set", "tuple", "print", "len"}
    | {"sum", "min", "max", "any", "all", "enumerate", "next", "iter"}
)


def is_ended_through(recogniser: Recogniser, field: str, protocol: str) -> bool:
    """By a method of a class that mentions the field, by a function that does, or by whoever is shown what is
    there. Where nothing is known to end such leases, anybody may."""
    names = recogniser.ending_names(protocol)
    if not names:
        return True
    asked: set[Class] = set()
    for module in recogniser.calls.model.project.parsed():
        for function in list(module.by_node.values()) if field in module.text else ():
            if function.cls in asked or field not in function.text:
                continue
            together = [function, *(function.cls.methods.values() if function.cls is not None else ())]
            if any(_may_end(each, names, field[1:]) for each in together):
                return True
            if function.cls is not None:
                asked.add(function.cls)
    return False


def is_named_to_an_end(recogniser: Recogniser, field: str, protocol: str) -> bool:
    """`self.budget.refund(request.charged)` says nothing of `request.wanted`: by a function that ends such
    leases, or tells somebody else what is in the field."""
    names, taking = recogniser.ending_names(protocol), recogniser.taking_names(protocol)
    for module in recogniser.calls.model.project.parsed():
        for function in list(module.by_node.values()) if field in module.text else ():
            if field not in function.text:
                continue
            told = (call for call in function.calls if last_name(call) not in taking | LOGGING | NOTING)
            handed = any(_mentions(each, field[1:]) for call in told for each in call.args)
            if handed or _ends(function, names):
                return True
    return not names


def _may_end(function: Function, names: frozenset[str], field: str) -> bool:
    if _ends(function, names):
        return True
    return field in function.text and (_shows(function, field) or _hands_on(function, field))


def _ends(function: Function, names: frozenset[str]) -> bool:
    return any(last_name(call) in names for call in function.calls)


def _shows(function: Function, field: str) -> bool:
    """`return list(self.active)`, and not `return self.active[name]`, `len(self.active) < self.most`."""
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    return any(value is not None and _mentions(value, field) for value in returned)


def _only_asked(node: ast.AST) -> list[ast.expr]:
    """What is looked into, counted, or asked for one thing."""
    match node:
        case ast.Subscript(value=value):
            return [value]
        case ast.Call(func=ast.Name(id="len" | "bool"), args=[value]):
            return [value]
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[value]):
            return [value]
    return []


def _hands_on(function: Function, field: str) -> bool:
    """`self.ended(self.active.pop())`: others are told what was there, one by one."""
    named = {
        name.id
        for target, value in (*assignments(function), *_loops(function))
        if _mentions(value, field)
        for name in walk(target)
        if isinstance(name, ast.Name)
    }
    for call in function.calls:
        if last_name(call) not in LOGGING | NOTING:
            told = [part for each in call.args for part in walk(each)]
            if any(_mentions(each, field) or getattr(each, "id", "") in named for each in told):
                return True
    return False


def _loops(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in function.nodes:
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield node.target, node.iter


def _mentions(value: ast.AST, field: str) -> bool:
    parts = list(walk(value))
    asked = {id(each) for part in parts for each in _only_asked(part)}
    return any(getattr(each, "attr", "") == field and id(each) not in asked for each in parts)

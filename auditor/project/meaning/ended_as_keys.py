"""Tables whose keys are leases: `self.waiting[index] = job`, and elsewhere `for index in list(self.waiting):`
gives the index back, or `self.waiting.pop(index)` of an index that somebody says again. Most tables under a
number say something of it, and end nothing."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name

COPIES = frozenset({"list", "tuple", "sorted", "set", "reversed", "frozenset"})


def ends_its_keys(recogniser: Recogniser, field: str, protocol: str) -> bool:
    """Whether a function goes over a field of this name and gives back what it finds as keys there."""
    names = recogniser.ending_names(protocol)
    for module in recogniser.calls.model.project.parsed() if names else ():
        asked = field in module.text and any(f"{name}(" in module.text for name in names)
        for function in module.by_node.values() if asked else ():
            both = field in function.text and any(f"{name}(" in function.text for name in names)
            keys = _with_listed(function, set(_keys_of(function, field[1:]))) if both else ()
            if keys and any(_is_told(call, keys) for call in function.calls if last_name(call) in names):
                return True
    return False


def _is_told(call: ast.Call, keys: set[str]) -> bool:
    told = (*call.args, *(keyword.value for keyword in call.keywords))
    return any(isinstance(each, ast.Name) and each.id in keys for each in told)


def _keys_of(function: Function, field: str) -> Iterator[str]:
    """Names that a loop, or `popitem()`, gives to keys of the table, and of keys that are struck off."""
    for node in function.nodes:
        match node:
            case ast.For(target=target, iter=over) | ast.AsyncFor(target=target, iter=over):
                of_pairs = _goes_over(over, field)
            case ast.comprehension(target=target, iter=over):
                of_pairs = _goes_over(over, field)
            case ast.Assign(
                targets=[target],
                value=ast.Call(func=ast.Attribute(value=ast.Attribute(attr=table), attr="popitem")),
            ) if table == field:
                of_pairs = True
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr=table), attr="pop"),
                    args=[ast.Name(id=key), *_],
                )
                | ast.Subscript(value=ast.Attribute(attr=table), slice=ast.Name(id=key), ctx=ast.Del())
            ) if table == field:
                yield key
                continue
            case _:
                continue
        match target:
            case ast.Tuple(elts=[ast.Name(id=name), _]) if of_pairs:
                yield name
            case ast.Name(id=name) if of_pairs is False:
                yield name


def _with_listed(function: Function, keys: set[str]) -> set[str]:
    """`done = [key for key in self.waiting if self.is_over(key)]`, and the names of who goes over that."""
    lists = {
        to.id
        for to, value in assignments(function)
        if isinstance(to, ast.Name) and isinstance(value, ast.ListComp | ast.SetComp)
        if getattr(value.elt, "id", "") in keys
    }
    loops = (node for node in function.nodes if isinstance(node, ast.For | ast.AsyncFor))
    over = (node.target for node in loops if getattr(node.iter, "id", "") in lists)
    return keys | {target.id for target in over if isinstance(target, ast.Name)}


def _goes_over(over: ast.expr, field: str) -> bool | None:
    """True where it gives keys with what is under them, False where it gives keys, None of other things."""
    match over:
        case ast.Call(func=ast.Name(id=copy), args=[inner]) if copy in COPIES:
            return _goes_over(inner, field)
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=table), attr="items" | "keys" as way)):
            return way == "items" if table == field else None
        case ast.Attribute(attr=table) if table == field:
            return False
        case ast.Starred(value=inner):
            return _goes_over(inner, field)
        case ast.BinOp(left=left, op=ast.Add() | ast.BitOr(), right=right):
            return _of_any((left, right), field)
        case (
            ast.Call(func=ast.Name(id="chain") | ast.Attribute(attr="chain"), args=parts)
            | ast.Tuple(elts=parts)
        ):
            return _of_any(parts, field)
        case ast.List(elts=parts) | ast.Set(elts=parts):
            return _of_any(parts, field)
    return None


def _of_any(parts: Sequence[ast.expr], field: str) -> bool | None:
    """`list(self.sent) + list(self.waiting)`, `(*self.sent, *self.waiting)`"""
    found = [way for each in parts if (way := _goes_over(each, field)) is not None]
    return found[0] if found else None

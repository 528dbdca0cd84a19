"""Amounts of which a record says something else than was taken: `if not rows.reserve(n): return False`, and
`req.rows += accepted`, where the one that ends the request goes by `req.rows`.

Others who take from the same budget write into that field what they have taken. A constant there, what the
record has by default, another parameter, or nothing at all though the record is at hand, is another."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, given_to, told_by_position
from auditor.project.code.calls import Calls
from auditor.project.code.kept_as_told import field_told
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.records_told import fields_told
from auditor.project.meaning.releases import Releases
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def notes_otherwise(recogniser: Releases, function: Function, acquire: ast.Call, protocol: str) -> bool:
    """Whoever mentions an end, or hands on what he has taken, may see to it himself."""
    calls, ends = recogniser.calls, recogniser.ending_names(protocol)
    taking = recogniser.taking_names(protocol) | {last_name(acquire)}
    taken = amount_told(acquire)
    if taken is None or isinstance(taken, ast.Constant) or _sees_to_it(function, acquire, taken, ends):
        return False
    field = _field_given_back(function, taking, ends)
    if field is None or not _is_written_by_others(calls, function, taking, field):
        return False
    noted = list(_noted(calls, function, field))
    if noted:
        return all(_is_another(function, value, taken) for value in noted)
    return _has_it_at_hand(function, taken, field)


def amount_told(call: ast.Call) -> ast.expr | None:
    """The one thing that it is told, but for how long to wait."""
    told = [*call.args, *(each.value for each in call.keywords if each.arg not in WAITING)]
    return told[0] if len(told) == 1 and not isinstance(told[0], ast.Starred) else None


WAITING = frozenset({"timeout", "wait", "block", "blocking", "deadline"})
"""Parameters that say whether to wait, and how long."""


def _sees_to_it(function: Function, acquire: ast.Call, taken: ast.expr, ends: Set[str]) -> bool:
    """It mentions an end, answers with a number, or tells somebody else what it took or what it took for."""
    if any(isinstance(node, ast.Attribute) and node.attr in ends for node in function.nodes):
        return True
    answers = [node.value for node in function.statements if isinstance(node, ast.Return)]
    if not all(value is None or isinstance(value, ast.Constant | ast.Name) for value in answers):
        return True
    names = {ast.unparse(taken)}
    return any(
        ast.unparse(given) in names
        for call in function.calls
        if call is not acquire and call.lineno > acquire.lineno and not last_name(call)[:1].isupper()
        for given in (*call.args, *(each.value for each in call.keywords))
    )


def _field_given_back(function: Function, taking: Set[str], ends: Set[str]) -> str | None:
    """The one field by which all who have not taken it themselves give it back."""
    found: set[str] = set()
    for each in function.module.by_node.values():
        if each.qualname == "<module>" or _takes(each, taking):
            continue
        for call in each.calls:
            if last_name(call) in ends:
                match amount_told(call):
                    case ast.Attribute(value=of, attr=field) if getattr(of, "id", "") != each.owner:
                        found.add(field)
                    case _:
                        found.add("")
    return found.pop() or None if len(found) == 1 else None


def _takes(function: Function | None, taking: Set[str]) -> bool:
    """Itself, or the function that it stands in."""
    return function is not None and (
        any(last_name(call) in taking for call in function.calls) or _takes(function.parent, taking)
    )


def _is_written_by_others(calls: Calls, function: Function, taking: Set[str], field: str) -> bool:
    """`self.calls[n] = Call(n, cost=weight)` in another function that has taken `weight`."""
    for each in function.module.by_node.values():
        told = [amount_told(call) for call in each.calls if last_name(call) in taking]
        texts = {ast.unparse(amount) for amount in told if amount is not None}
        if each is not function and any(ast.unparse(value) in texts for value in _noted(calls, each, field)):
            return True
    return False


def _noted(calls: Calls, function: Function, field: str) -> Iterator[ast.expr]:
    """What the function writes into a field so named, of whatever."""
    for node in function.nodes:
        match node:
            case ast.AugAssign(target=ast.Attribute(attr=name), op=ast.Add(), value=value) if name == field:
                yield value
            case ast.Call() if last_name(node)[:1].isupper():
                made = calls.model.callee(function, node.func)
                if isinstance(made, Class):
                    yield from _told_of(calls, made, node, field)
    for target, value in assignments(function):
        if isinstance(target, ast.Attribute) and target.attr == field:
            yield value


def _told_of(calls: Calls, made: Class, call: ast.Call, field: str) -> Iterator[ast.expr]:
    """What the new object has in this field: what it is told, or what it has by default."""
    init = calls.model.method(made, "__init__")
    told = {}
    for at, value in told_by_position(call):
        if init is None or isinstance(at, str):
            told[field_told(calls.model, made, at)[1:]] = value
        elif at + 1 < len(init.parameters):
            told[init.parameters[at + 1]] = value
    by_default = dict(fields_told(calls, made, call))
    if field in told:
        yield told[field]
    elif field in by_default:
        yield ast.Constant(None if by_default[field] is None else 1)


def _is_another(function: Function, noted: ast.expr, taken: ast.expr) -> bool:
    """A constant; or another parameter, where a parameter was taken."""
    if isinstance(noted, ast.Constant):
        return isinstance(noted.value, int)
    parameters = {name for name in function.parameters if not any(given_to(function, name))}
    both = (getattr(noted, "id", ""), getattr(taken, "id", ""))
    return both[0] != both[1] and parameters.issuperset(both)


def _has_it_at_hand(function: Function, taken: ast.expr, field: str) -> bool:
    """The record's other fields are written, `transfer.blocks += more`, or this one is read before; and the
    amount is put nowhere else, nor is anybody told of the record."""
    stored = [(each, value) for each, value in assignments(function) if not isinstance(each, ast.Name)]
    if any(ast.unparse(taken) == ast.unparse(part) for _, value in stored for part in walk(value)):
        return False
    fields = [node for node in function.nodes if isinstance(node, ast.Attribute)]
    records = {
        node.value.id
        for node in fields
        if isinstance(node.value, ast.Name) and (isinstance(node.ctx, ast.Store) or node.attr == field)
    }
    records.discard(function.owner or "")
    return bool(records) and records.isdisjoint(_told_to_others(function))


def _told_to_others(function: Function) -> set[str]:
    """Names of what calls are told, or whose methods are called; `max(req.rows, 1)` is not told of `req`."""
    told = [
        part
        for call in function.calls
        for given in (*call.args, *(each.value for each in call.keywords))
        for part in (given.elts if isinstance(given, ast.Tuple | ast.List) else [given])
    ]
    told += [call.func.value for call in function.calls if isinstance(call.func, ast.Attribute)]
    return {each.id for each in told if isinstance(each, ast.Name)}

"""Leases that are ended under the key by which they were asked for: `gateway.open_session(key)` returns the
row that a table has under the key, and `gateway.end_session(key)` looks that up again and gives it back."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import given_to
from auditor.project.code.calls import is_bound, parameter_for
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.source.nodes import walk


def ends_what_was_asked(
    recogniser: Recogniser, function: Function, call: ast.Call, begun: ast.Call, protocol: str
) -> bool:
    """Both are methods of one object, and told the same key; the one hands it to the pool, the other finds
    under it what it gives back."""
    match begun.func, call.func:
        case ast.Attribute(value=one), ast.Attribute(value=other) if ast.dump(one) == ast.dump(other):
            pass
        case _:
            return False
    told = {each.id for each in begun.args if isinstance(each, ast.Name)}
    shared = [each.id for each in call.args if isinstance(each, ast.Name) and each.id in told]
    beginning, ending = (recogniser.calls.targets(function, each)[0] for each in (begun, call))
    if len(beginning) != 1 or len(ending) != 1 or beginning[0].cls is None or beginning == ending:
        return False
    if ending[0].cls is not beginning[0].cls:
        return False
    return any(
        _asks_under(recogniser, beginning[0], key, protocol)
        and _ends_under(recogniser, ending[0], other, protocol)
        for name in shared
        for key, other in [(_parameter(beginning[0], begun, name), _parameter(ending[0], call, name))]
        if key is not None and other is not None
    )


def _parameter(target: Function, call: ast.Call, name: str) -> str | None:
    position = next(at for at, each in enumerate(call.args) if getattr(each, "id", "") == name)
    return parameter_for(target, position, is_bound(target, call))


def _asks_under(recogniser: Recogniser, method: Function, key: str, protocol: str) -> bool:
    """`self.rows.open_row(key, worker)`, which lends what is returned."""
    for call in method.calls if not list(given_to(method, key)) else ():
        if any(getattr(each, "id", "") == key for each in call.args):
            source = recogniser.source(method, call)
            if source is not None and source.protocol == protocol:
                return True
    return False


def _ends_under(recogniser: Recogniser, method: Function, key: str, protocol: str) -> bool:
    """`row = self.rows.get(key)`, `self.rows.close_row(row)`."""
    if list(given_to(method, key)):
        return False
    for call in method.calls:
        for position, each in enumerate(call.args):
            found = each if not isinstance(each, ast.Name) else next(given_to(method, each.id), each)
            if key in _keys_looked_up(found) and recogniser.releases(method, call, position, protocol):
                return True
    return False


def _keys_looked_up(value: ast.expr) -> Iterator[str]:
    """`self.rows[key]`, `self.rows.pop(key, None)`, `self.find(key)`."""
    match value:
        case ast.Subscript(value=ast.Attribute(), slice=ast.Name(id=key)):
            yield key
        case ast.Call(func=ast.Attribute(), args=[ast.Name(id=key), *rest]) if not any(
            isinstance(node, ast.Name) for each in rest for node in walk(each)
        ):
            yield key

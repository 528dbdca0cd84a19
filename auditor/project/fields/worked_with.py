"""Methods that strike an entry off a table, and work with what lies there under another name."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

TAKING_OUT = frozenset({"pop", "popleft", "popitem", "get", "get_nowait"})


def works_with_its_entry(method: Function, attribute: str, ends: Set[str] = frozenset()) -> bool:
    """`self.mine.pop(claim.name)`, and `claim.abandon()`: what it is told lies there; or
    `for page in claim.pages: self.pages.put_back(page)`, where that is one of the pool's `ends`."""
    struck, read_off = set[str](), set[str]()
    for node in method.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=table, attr="pop"), args=[key, *_]):
                pass
            case ast.Subscript(value=table, slice=key, ctx=ast.Del()):
                pass
            case _:
                continue
        if own_attribute(table, method.owner or "") == attribute:
            named = {each.id for each in walk(key) if isinstance(each, ast.Name)} - {method.owner}
            struck |= named
            read_off |= named if isinstance(key, ast.Attribute) else set()
    come_with_it = {name for names in _taken_together(method, attribute) if names & struck for name in names}
    if any(last_name(call) in ends and _is_of(call, method, come_with_it) for call in method.calls):
        return True
    told = read_off & set(method.parameters[1:])
    return _goes_to_another(method, told) or any(
        (isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in told)
        or (last_name(call) in ends and _is_of(call, method, told))
        for call in (method.calls if told else ())
    )


def _goes_to_another(method: Function, told: Set[str]) -> bool:
    """`row = victim.row`, and `request.row = row`: another record has it from now on."""
    read = [
        (value.attr, {ast.unparse(value), ast.unparse(target)})
        for target, value in assignments(method)
        if isinstance(value, ast.Attribute) and getattr(value.value, "id", "") in told
    ]
    return any(
        isinstance(target, ast.Attribute)
        and getattr(target.value, "id", method.owner) not in {*told, method.owner}
        and any(target.attr == field and ast.unparse(value) in names for field, names in read)
        for target, value in assignments(method)
    )


def _is_of(call: ast.Call, method: Function, told: Set[str]) -> bool:
    """It is given something that lies in one of these, `claim.pages`, or an element of that."""
    loops = [node for node in method.nodes if isinstance(node, ast.For | ast.comprehension)]
    given = {each.id for argument in call.args for each in walk(argument) if isinstance(each, ast.Name)}
    for loop in loops:
        if given & {each.id for each in walk(loop.target) if isinstance(each, ast.Name)}:
            given |= {each.id for each in walk(loop.iter) if isinstance(each, ast.Name)}
    return not given.isdisjoint(told)


def _taken_together(method: Function, attribute: str) -> Iterator[set[str]]:
    """`key` and `page` of `key, page = self.due.popleft()`, or of `heappop(self.due)`."""
    for target, value in assignments(method):
        match target, value:
            case ast.Tuple(elts=parts), (
                ast.Call(
                    func=ast.Attribute(attr="heappop" as way) | ast.Name(id="heappop" as way), args=[table]
                )
                | ast.Call(func=ast.Attribute(value=table, attr=way))
            ) if way in TAKING_OUT | {"heappop"}:
                if own_attribute(table, method.owner or "") not in (None, attribute):
                    yield {each.id for each in parts if isinstance(each, ast.Name)}

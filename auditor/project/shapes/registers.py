"""Registers: one method makes, records and hands out, another, called so, strikes off."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import FieldWork, Put
from auditor.protocols.vocabulary import undoes
from auditor.source.nodes import walk

LISTENERS = re.compile(
    r"call_?back|hook|listen|handler|observ|watch|subscri|func|fn(?:_|$)|plugin|metric|route|event"
)
"""What is registered for good as often as not."""

CHOOSING = re.compile(r"_*(?:de|un)?(?:select|enable)")
"""Names of methods that say what is to be used from now on."""

RELEASES = frozenset({"release", "free", "dealloc", "deallocate", "relinquish", "give_back", "surrender"})
"""Names that say that a lease ends, whatever the taking is called."""

CLOSES = re.compile(r"_*(?:close|shut_?down|reset|clear|stop|exit|init|del|abort_all|release_all|free_all)_*")


def registers(
    lending: Sequence[FieldWork], given: Sequence[FieldWork]
) -> Iterator[tuple[FieldWork, FieldWork]]:
    """Who records, and who strikes it off."""
    for taker in (work for work in lending if work.put and not CHOOSING.match(work.method.name)):
        for giver in (work for work in given if work.removed):
            if (
                giver is not taker
                and any(_records(taker, put) and strikes(giver, put.field) for put in taker.put)
                and (
                    undoes(giver.method.name, taker.method.name)
                    or any(is_limited(taker.method, put.field) for put in taker.put if _records(taker, put))
                )
            ):
                yield taker, giver
    yield from _under_drawn_numbers(lending, given)


def is_limited(method: Function, field: str) -> bool:
    """`if len(self.seated) >= self.capacity: raise Full`, or it waits: so many there may be, and somebody has
    to make room. Not where it makes room itself."""
    own = method.owner or ""
    for node in method.statements:
        if isinstance(node, ast.While):
            refuses = not any(isinstance(n, ast.Attribute) and n.attr == field for n in _inside(node))
        else:
            refuses = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise | ast.Return)
        if refuses and any(_is_its_length(side, own, field) for side in _compared(node)):
            return True
    return False


def _inside(loop: ast.While) -> Iterator[ast.AST]:
    return (inner for each in loop.body for inner in walk(each))


def _compared(node: ast.stmt) -> Iterator[ast.expr]:
    for each in walk(getattr(node, "test", None) or ast.Pass()):
        if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            yield from (each.left, *each.comparators)


def _is_its_length(side: ast.expr, own: str, field: str) -> bool:
    """`len(self.seated)`, or the sum of what stands there, and more: `sum(self.shares.values()) + wanted`."""
    match side:
        case ast.Call(func=ast.Name(id="len"), args=[each]):
            return own_attribute(each, own) == field
        case ast.BinOp(left=whole, op=ast.Add()):
            return _is_its_length(whole, own, field)
        case ast.Call(
            func=ast.Name(id="sum"), args=[ast.Call(func=ast.Attribute(value=each, attr="values"), args=[])]
        ):
            return own_attribute(each, own) == field
    return False


def _under_drawn_numbers(
    lending: Sequence[FieldWork], given: Sequence[FieldWork]
) -> Iterator[tuple[FieldWork, FieldWork]]:
    """`n = self.next`, `self.handles[n] = "ready"`, and n is handed out, to be told to `release(n)`; nothing
    else takes it out of the table, as for what comes to its end by itself."""
    givers = [work for work in given if work.method.name in RELEASES]
    for taker in lending if givers else ():
        for put in taker.put:
            if put.key is None or not _numbered(taker, put.key) or LISTENERS.search(put.field):
                continue
            back = [each for each in givers if each is not taker and strikes(each, put.field)]
            if back and not _goes_by_itself(back, put.field):
                yield from ((taker, each) for each in back)


def _goes_by_itself(givers: Sequence[FieldWork], field: str) -> bool:
    cls = givers[0].method.cls
    ending = [each.method for each in givers]
    return cls is None or any(
        method not in ending and not CLOSES.fullmatch(name) and _takes_out(method, field)
        for name, method in cls.methods.items()
        if f".{field}" in method.text
    )


def _takes_out(method: Function, field: str) -> bool:
    own = method.owner or ""
    for node in method.nodes:
        match node:
            case ast.Subscript(value=table, ctx=ast.Del()):
                pass
            case ast.Call(func=ast.Attribute(value=table, attr="pop" | "popitem" | "clear")):
                pass
            case ast.Attribute(ctx=ast.Store()) as table:
                pass
            case _:
                continue
        if own_attribute(table, own) == field:
            return True
    return False


def _records(work: FieldWork, put: Put) -> bool:
    """What it made, or numbered, itself, and hands out: not what it was told."""
    if put.key is not None and isinstance(put.value, ast.Name) and put.value.id in work.told:
        return _numbered(work, put.key) and not LISTENERS.search(
            f"{work.method.name}_{put.value.id}_{put.field}"
        )
    recorded = {ast.unparse(_without_id(each)) for each in (put.key, put.value) if each is not None}
    returned = {ast.unparse(value) for value in work.returned} - work.told
    of_returned = {text for text in recorded if text.partition(".")[0] in returned}
    return bool(recorded & returned or of_returned)


def _without_id(value: ast.expr) -> ast.expr:
    """`buffer` of `self.lent.add(id(buffer))`."""
    match value:
        case ast.Call(func=ast.Name(id="id"), args=[each]):
            return each
    return value


def _numbered(work: FieldWork, key: ast.expr) -> bool:
    """`self.granted[self.number] = size`, and the number, counted up before, is returned."""
    given = given_to(work.method, key.id) if isinstance(key, ast.Name) else iter((key,))
    own = any(_is_number(value, {field for field, _ in work.counted}) for value in given)
    return own and ast.unparse(key) in {ast.unparse(value) for value in work.returned}


def strikes(work: FieldWork, name: str) -> bool:
    """On a way that a user expects: `kill(pid)` strikes off in a handler what had died before."""
    struck = [key for each, key in work.removed if each == name and work.is_from_told(key)]
    tries = (each for each in work.method.statements if isinstance(each, ast.Try)) if struck else ()
    handled = {id(node) for each in tries for handler in each.handlers for node in walk(handler)}
    return any(id(key) not in handled for key in struck)


def _is_number(value: ast.expr, counted: set[str]) -> bool:
    """`self.number`, `next(self.numbers)`, `uuid.uuid4().hex`, `object()`"""
    match value:
        case ast.Call(func=ast.Name(id="object"), args=[]):
            return True
        case ast.Attribute(value=ast.Name(), attr=attr):
            return attr in counted
        case ast.Call(func=ast.Name(id="next"), args=[ast.Attribute(value=ast.Name())]):
            return True
    return any(isinstance(each, ast.Attribute) and each.attr.startswith("uuid") for each in walk(value))

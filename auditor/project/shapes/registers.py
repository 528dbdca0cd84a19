"""Registers: one method makes, records and hands out, another, called so, strikes off."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import given_to
from auditor.project.shapes.field_work import FieldWork, Put
from auditor.protocols.vocabulary import undoes
from auditor.source.nodes import walk

LISTENERS = re.compile(
    r"call_?back|hook|listen|handler|observ|watch|subscri|func|fn(?:_|$)|plugin|metric|route|event"
)
"""What is registered for good as often as not."""


def registers(
    lending: Sequence[FieldWork], given: Sequence[FieldWork]
) -> Iterator[tuple[FieldWork, FieldWork]]:
    """Who records, and who strikes it off."""
    for taker in (work for work in lending if work.put):
        for giver in (work for work in given if work.removed):
            if (
                giver is not taker
                and undoes(giver.method.name, taker.method.name)
                and any(_records(taker, put) and strikes(giver, put.field) for put in taker.put)
            ):
                yield taker, giver


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
    """`self.number`, `next(self.numbers)`, `uuid.uuid4().hex`"""
    match value:
        case ast.Attribute(value=ast.Name(), attr=attr):
            return attr in counted
        case ast.Call(func=ast.Name(id="next"), args=[ast.Attribute(value=ast.Name())]):
            return True
    return any(isinstance(each, ast.Attribute) and each.attr.startswith("uuid") for each in walk(value))

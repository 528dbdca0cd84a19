"""Caches, of which the oldest entry goes when there are too many:

    def insert(self, digest, block):
        self.entries[digest] = self.pool.share(block)
        while len(self.entries) > self.capacity:
            _, oldest = self.entries.popitem(last=False)
            self.pool.drop(oldest)

What is cached comes again: the entry that it has by then is written over, and nobody gives that back."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Acquisition
from auditor.project.code.bindings import own_attribute
from auditor.project.fields.filling_again import Filling, attributes_before
from auditor.source.nodes import walk


def comes_to_a_cache_again(filling: Filling, acquisition: Acquisition, call: ast.Call) -> bool:
    """Of what is told to the `call` that counts it, so that others may have it as well; not where the method
    asks the table before for anything but how many there are."""
    method, own = filling.method, filling.method.owner or ""
    told = any(isinstance(arg, ast.Name) for arg in call.args)
    oldest = list(_drops_of_the_oldest(filling))
    if filling.key is None or acquisition.foreign or not (told and oldest):
        return False
    measured = {
        id(arg) for call in method.calls if getattr(call.func, "id", "") == "len" for arg in call.args
    }
    dropping = {id(part) for node in oldest for part in walk(node)}
    return not any(
        own_attribute(each, own) == filling.field and id(each) not in measured | dropping
        for each in attributes_before(filling)
    )


def _drops_of_the_oldest(filling: Filling) -> Iterator[ast.stmt]:
    own = filling.method.owner or ""
    for node in filling.method.statements:
        if (
            isinstance(node, ast.While | ast.If)
            and _drops(node, own, filling.field)
            and any(_is_length(each, own, filling.field) for each in walk(node.test))
        ):
            yield node


def _drops(statement: ast.stmt, own: str, field: str) -> bool:
    """`self.entries.popitem(last=False)`, `self.entries.pop(next(iter(self.entries)))`"""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("popitem", "pop")
        and own_attribute(node.func.value, own) == field
        for node in walk(statement)
    )


def _is_length(node: ast.AST, own: str, field: str) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[table]):
            return own_attribute(table, own) == field
    return False

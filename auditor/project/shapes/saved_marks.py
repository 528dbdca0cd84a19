"""Marks that an object sets on a stack of its own: `push()` notes how far it has come, `pop()` goes back.

    def push(self):
        self._marks.append(self._top)

    def pop(self):
        self._top = self._marks.pop()

Whatever the two are called, who sets a mark has to take it off, else all further ones go back too little."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.project.shapes.pool_state import own_parameters


def saved_marks(methods: list[Function]) -> Iterator[tuple[Function, list[Function]]]:
    """With all methods that take a mark off, be it only to go on from where they are."""
    text = methods[0].cls.text if methods and methods[0].cls is not None else ""
    if "append" not in text or "pop" not in text:
        return
    plain = [each for each in methods if not (each.name.startswith("__") or own_parameters(each))]
    for begins in plain:
        for stack, value in _noted(begins):
            ends = [each for each in methods if each is not begins and stack in _taken_off(each)]
            if any((stack, value) in _gone_back(each) for each in plain if each in ends):
                yield begins, ends


def _noted(method: Function) -> set[tuple[str, str]]:
    """Stacks of the object's own, with its fields of which one is put on them."""
    found = set()
    for call in method.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=stack, attr="append"), args=[value]):
                found.add((_field(method, stack), _field(method, value)))
    return {pair for pair in found if all(pair)}


def _gone_back(method: Function) -> set[tuple[str, str]]:
    """Those, where `self.top = self.marks.pop()`."""
    found = set()
    for node in method.statements:
        for target, value in assigned_by(node):
            match value:
                case ast.Call(func=ast.Attribute(value=stack, attr="pop"), args=[]):
                    found.add((_field(method, stack), _field(method, target)))
    return found


def _taken_off(method: Function) -> set[str]:
    """`self.marks.pop()`, whatever is done with it; `self.marks.clear()`."""
    asked = (each.func for each in method.calls)
    taking = (
        each.value for each in asked if isinstance(each, ast.Attribute) and each.attr in ("pop", "clear")
    )
    return {_field(method, stack) for stack in taking}


def _field(method: Function, node: ast.expr) -> str:
    return own_attribute(node, method.owner or "") or ""

"""Objects that a pool makes around what it lends, and that put it back themselves: `draw()` returns
`Strip(self, index)`, and a method of that calls `self.owner.free.append(self.index)`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Class
from auditor.project.shapes.name_bindings import FILLING


def given_back_by_objects(cls: Class) -> dict[str, Class]:
    """Fields of the class that such put something back into, with what puts it."""
    others = (each for each in cls.module.classes.values() if each is not cls)
    made = (each for each in others if f"return {each.name}(" in cls.text and "__del__" not in each.methods)
    return {field: other for other in made for field in _filled(other)}


def _filled(cls: Class) -> Iterator[str]:
    """Fields of another object, that it knows by a field, which are given what lies in a field of its own."""
    for method in cls.methods.values():
        own = method.owner or ""
        for call in method.calls:
            match call:
                case ast.Call(
                    func=ast.Attribute(value=ast.Attribute(value=owner, attr=field), attr=way), args=[put]
                ) if way in FILLING and own_attribute(owner, own) and own_attribute(put, own):
                    yield field

"""What a function, or the methods of a class, ask of one receiver: all of that tells its class."""

import ast
from collections.abc import Set

from auditor.project.code.modules import Class, Function, last_part
from auditor.protocols.vocabulary import singular, split


def asked_of(function: Function, receiver: ast.expr) -> Set[str]:
    """Methods that are called of the same name here, or of the same field anywhere in the class."""
    text = ast.unparse(receiver)
    of_own = function.cls is not None and text.startswith(f"{function.owner}.")
    near = function.cls.methods.values() if of_own and function.cls is not None else (function,)
    return frozenset(
        call.func.attr
        for each in near
        for call in each.calls
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == text
    )


def is_called_like(receiver: ast.expr, cls: Class) -> bool:
    """`pool` is called like a `ConnectionPool`, by the word that says what it is."""
    words = {singular(word) for word in split(last_part(receiver))}
    return not words.isdisjoint(singular(word) for word in split(cls.name)[-1:])

"""What a function, or the methods of a class, ask of one receiver: all of that together tells its class."""

import ast
from collections.abc import Set

from auditor.project.code.modules import Class, Function, last_part
from auditor.protocols.vocabulary import GUARDS, singular, split

SAYING_NOTHING = frozenset({"base", "abstract", "interface", "simple", "my", "the", "new", "data", "item"})
"""Words of classes' names by which none is told from another."""


def asked_of(function: Function, receiver: ast.expr) -> Set[str]:
    """Names of the methods that are called of the same name here, or of the same field anywhere in the class;
    of `self.locks[i]` and `self.locks[j]` alike."""
    text = ast.unparse(_listing(receiver))
    of_own = function.cls is not None and text.startswith(f"{function.owner}.")
    near = function.cls.methods.values() if of_own and function.cls is not None else (function,)
    return frozenset(
        call.func.attr
        for each in near
        for call in each.calls
        if isinstance(call.func, ast.Attribute) and ast.unparse(_listing(call.func.value)) == text
    )


def _listing(receiver: ast.expr) -> ast.expr:
    while isinstance(receiver, ast.Subscript):
        receiver = receiver.value
    return receiver


def is_called_like(receiver: ast.expr, cls: Class) -> bool:
    """`pool` is called like a `ConnectionPool`, by the word that says what it is, and so are
    `connections`."""
    words = [singular(word) for word in split(last_part(_listing(receiver)))]
    named = {singular(word) for word in split(cls.name)}
    if not GUARDS.intersection(words[-1:]) <= named:
        return False  # `turnstile_lock` is a lock, and no TurnstileHandler
    return not (named - SAYING_NOTHING).isdisjoint(words)

"""What a function, or the methods of a class, ask of one receiver: all of that together tells its class."""

import ast
import re
from collections.abc import Iterable, Set

from auditor.project.code.modules import Class, Function, Module, last_part
from auditor.protocols.vocabulary import GUARDS, POOLS, singular, split

SAYING_NOTHING = frozenset({"base", "abstract", "interface", "simple", "my", "the", "new", "data", "item"})
"""Words of classes' names by which none is told from another."""

Asked = dict[str, set[str]]
"""Names of methods by the receiver, as it is written."""


class AskedOf:
    """Reads each function, and each class, once."""

    def __init__(self) -> None:
        self._known: dict[Function | Class | Module, Asked] = {}

    def methods(self, function: Function, receiver: ast.expr) -> Set[str]:
        """What is called of the same name here, or of the same field anywhere in the class: of `self.rows[i]`
        and `self.rows[j]` alike."""
        text = ast.unparse(listing(receiver))
        of_own = text.startswith(f"{function.owner}.")
        where = function.cls if of_own and function.cls is not None else function
        if where not in self._known:
            near = where.methods.values() if isinstance(where, Class) else (where,)
            self._known[where] = _asked(near)
        return self._known[where].get(text, set())

    def in_module(self, function: Function, receiver: ast.expr) -> Set[str]:
        """The same of all fields so called in its module: who only takes `self.streams.get()` has what others
        give back to their `self.streams`, or to `self._streams`."""
        module = function.module
        if module not in self._known:
            together: Asked = {}
            self._known[module] = together
            asked = _asked(each for each in module.by_node.values() if each.is_method)
            for text, methods in asked.items():
                together.setdefault(_without_underscores(text), set()).update(methods)
        return self._known[module].get(_without_underscores(ast.unparse(listing(receiver))), set())


def _without_underscores(receiver: str) -> str:
    return re.sub(r"\._+", ".", receiver)


def _asked(functions: Iterable[Function]) -> Asked:
    found: Asked = {}
    for function in functions:
        for call in function.calls:
            if isinstance(call.func, ast.Attribute):
                receiver = ast.unparse(listing(call.func.value))
                found.setdefault(receiver, set()).add(call.func.attr)
    return found


def listing(receiver: ast.expr) -> ast.expr:
    """`self.rows` of `self.rows[i]`."""
    while isinstance(receiver, ast.Subscript):
        receiver = receiver.value
    return receiver


def is_called_like(receiver: ast.expr, cls: Class) -> bool:
    """`pool` is called like a `ConnectionPool`, by the word that says what it is, and so are
    `connections`."""
    words = [singular(word) for word in split(last_part(listing(receiver)))]
    named = {singular(word) for word in split(cls.name)}
    if not GUARDS.intersection(words[-1:]) <= named:
        return False  # `turnstile_lock` is a lock, and no TurnstileHandler
    return not (named - SAYING_NOTHING).isdisjoint(words)


def likeness(name: str, cls_name: str) -> int:
    """In how many words a name is that of a class, besides that it is a pool: `host_pool` is rather a
    `HostPool` than a `RequestPool`."""
    words, its = ({singular(word) for word in split(each)} for each in (name, cls_name))
    return len((words & its) - POOLS)


def is_called_a_pool(receiver: ast.expr) -> bool:
    """`self.buffer_pool`, which no dict or queue is called."""
    return not POOLS.isdisjoint(split(last_part(listing(receiver)))[-1:])

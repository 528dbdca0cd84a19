"""Whether what a function returns with a lease inside was made by it: then nobody else knows that object."""

import ast

from auditor.project.code.bindings import given_to, statements_of
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.protocols.vocabulary import split

CACHING = frozenset({"cache", "cached", "memoize", "memoized", "singleton"})
"""Words in the names of decorators by which whoever calls is shown the same object."""


def made_for_caller(calls: Calls, function: Function) -> bool:
    """Every return gives None or an object of the project made right there: `return Context(lease)`, or
    `context = Context(lease)`, of which only fields are touched before `return context`."""
    returned = [node.value for node in statements_of(function.node) if isinstance(node, ast.Return)]
    made = [value for value in returned if value is not None and not _is_none(value)]
    return bool(made) and all(_is_made(calls, function, value) for value in made)


def shows_the_same(function: Function) -> bool:
    """`@functools.lru_cache`; not `@mycache_traced`, which is about something else."""
    return any(not CACHING.isdisjoint(split(each)) for each in function.decorators)


def _is_made(calls: Calls, function: Function, value: ast.expr) -> bool:
    if not isinstance(value, ast.Name):
        return _constructs(calls, function, value)
    given = list(given_to(function, value.id))
    return (
        bool(given)
        and all(_constructs(calls, function, each) for each in given)
        and _is_known_to_nobody(function, value.id, len(given))
    )


def _constructs(calls: Calls, function: Function, value: ast.expr) -> bool:
    """A class of the project that does not end itself when it is dropped."""
    made = calls.targets(function, value)[1] if isinstance(value, ast.Call) else None
    return made is not None and not {"__del__", "__new__"} & made.methods.keys()


def _is_known_to_nobody(function: Function, name: str, assignments: int) -> bool:
    """Nothing else binds the name, and all that is done with it is `context.engine` and `return context`."""
    nodes = list(ast.walk(function.node))
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    harmless = {id(node.value) for node in nodes if isinstance(node, ast.Attribute | ast.Return)}
    read = [node for node in named if isinstance(node.ctx, ast.Load)]
    return len(named) - len(read) == assignments and all(id(node) in harmless for node in read)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None

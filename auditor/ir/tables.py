"""Dicts, by what their names are given: whoever goes over one, or makes a list of one, gets its keys, and
what lies under them stays where it is.

    members = self.groups.pop(group, {})      self.seats = {}
    return sorted(members)                    names = list(self.seats)"""

import ast

from auditor.ir.scope import FunctionNode
from auditor.source.nodes import walk

MAKING = frozenset({"dict", "defaultdict", "OrderedDict", "WeakValueDictionary"})
LOOKING_UP = frozenset({"get", "pop", "setdefault"})
GOING_OVER = frozenset(
    {"list", "tuple", "set", "frozenset", "sorted", "reversed", "iter", "enumerate", "min", "max", "any",
     "all", "filter", "map", "zip", "islice"}
)  # fmt: skip
"""Functions that go over what they are told."""

COPYING = frozenset({"list", "tuple", "set", "frozenset", "sorted", "reversed", "iter"})


def is_table(value: ast.expr) -> bool:
    match value:
        case ast.Dict() | ast.DictComp():
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in MAKING:
            return True
        case ast.Call(func=ast.Attribute(attr=name), args=[_, default]) if name in LOOKING_UP:
            return is_table(default)
    return False


def copied_table(value: ast.expr) -> ast.expr | None:
    """`self.seats` of `list(self.seats)`, `sorted(self.seats.keys(), key=score)`."""
    match value:
        case ast.Call(func=ast.Name(id=name), args=[inner]) if name in COPYING:
            return copied_table(inner) or inner
        case ast.Call(func=ast.Attribute(value=table, attr="keys"), args=[]):
            return table
    return None


def first_named(function: FunctionNode) -> frozenset[tuple[str, str]]:
    """Local names that begin as a parameter which stays what it is: `best, score = start, 0.0`."""
    if isinstance(function, ast.Module | ast.Lambda):
        return frozenset()
    args = function.args
    told = {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    begun: set[tuple[str, str]] = set()
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=first)):
                begun.add((name, first))
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                sides = zip(names, values, strict=False)
                begun |= {
                    (a.id, b.id) for a, b in sides if isinstance(a, ast.Name) and isinstance(b, ast.Name)
                }
    begun = {(name, first) for name, first in begun if first in told and name not in told}
    stores = (node for node in walk(function) if isinstance(node, ast.Name)) if begun else ()
    bound = {node.id for node in stores if isinstance(node.ctx, ast.Store)}
    return frozenset((name, first) for name, first in begun if first not in bound)


def named_copies(function: FunctionNode) -> dict[str, ast.expr]:
    """What local names that are given once are copies of."""
    given: dict[str, ast.expr] = {}
    bound: dict[str, int] = {}
    for node in walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if copied_table(value) is not None:
                given[name] = value
            case ast.Name(id=name, ctx=ast.Store()):
                bound[name] = bound.get(name, 0) + 1
    return {name: value for name, value in given.items() if bound[name] == 1}


def named_tables(function: FunctionNode) -> frozenset[str]:
    """Local names that are given nothing else."""
    given: dict[str, int] = {}
    bound: dict[str, int] = {}
    for node in walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_table(value):
                given[name] = given.get(name, 0) + 1
            case ast.Name(id=name, ctx=ast.Store()):
                bound[name] = bound.get(name, 0) + 1
    return frozenset(name for name, times in given.items() if times == bound[name])

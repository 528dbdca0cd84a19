"""What a class does with a pool of its own: what it has of it from birth, how it empties it at the end."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Class, Function, last_part
from auditor.source.nodes import walk

ENDS = frozenset({"close", "aclose", "disconnect", "terminate", "shutdown", "stop", "quit", "logout", "kill"})
"""Methods that end an object for good."""

MEMORY = frozenset({"SharedMemory", "mmap"})


def taken_at_birth(acquire: ast.Call, function: Function) -> bool:
    """`self.pages = Pages(n)`, and `self.pages.take(1)` in the same `__init__`: what an object has of its own
    pool from the start it keeps."""
    match acquire.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id=owner), attr=pool)) if (
            function.name
            in (
                "__init__",
                "__post_init__",
            )
            and owner == function.owner
        ):
            return any(own_attribute(target, owner) == pool for target in _made(function))
    return False


def is_memory_of_a_pool(acquire: ast.Call, function: Function, pools: Set[Class]) -> bool:
    """`self.memory = SharedMemory(create=True, size=n)` of a pool that lends pieces of it and has no end: it
    lives as long as the process."""
    cls = function.cls
    mapped = last_part(acquire.func) in MEMORY and function.name == "__init__"
    return mapped and cls in pools and cls is not None and ENDS.isdisjoint(cls.methods)


def _made(function: Function) -> Iterator[ast.expr]:
    """What is assigned a new object of a class."""
    for node in function.statements:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_new(node.value):
            yield from node.targets if isinstance(node, ast.Assign) else [node.target]


def _is_new(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and last_part(value.func)[:1].isupper()


def empties_itself(acquire: ast.Call, function: Function) -> bool:
    """`while not self.idle.empty(): self.idle.get_nowait()`, in a method that ends all it has by another
    list of its own."""
    own = function.owner
    match acquire.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id=owner), attr=queue)) if owner == own:
            drained = any(
                isinstance(loop, ast.While) and any(_drops(each, acquire) for each in walk(loop))
                for loop in function.nodes
            )
            return drained and _ends_each(function, owner, queue)
    return False


def _drops(node: ast.AST, acquire: ast.Call) -> bool:
    dropped = node.value if isinstance(node, ast.Expr) else None
    return (dropped.value if isinstance(dropped, ast.Await) else dropped) is acquire


def _ends_each(function: Function, owner: str, queue: str) -> bool:
    """It goes over another field, or a list made of one, and calls an end."""
    named = {
        target.id
        for node in function.statements
        if isinstance(node, ast.Assign) and _fields(node.value, owner) - {queue}
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in function.nodes:
        if isinstance(node, ast.For | ast.AsyncFor):
            over, ends = node.iter, any(map(_is_end, walk(node)))
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            over, ends = node.generators[0].iter, any(map(_is_end, walk(node.elt)))
        else:
            continue
        names = {each.id for each in walk(over) if isinstance(each, ast.Name)}
        if ends and (_fields(over, owner) - {queue} or names & named):
            return True
    return False


def _is_end(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_part(node.func) in ENDS


def _fields(node: ast.AST, owner: str) -> set[str]:
    return {
        attribute
        for each in walk(node)
        if isinstance(each, ast.Attribute) and (attribute := own_attribute(each, owner)) is not None
    }

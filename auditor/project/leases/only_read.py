"""Things that are counted up, pinned or fetched only to read what is in them: `return
self.params[name].gather().clone()`, `max(float(fetch(p).max()) for p in params)`.

The values are copied in the same expression, or numbers are worked out from them, and nothing is noted of the
thing. Others may end what they know of, but here nobody is told, while elsewhere in the tree whoever takes
one gives it back himself."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.leases.only_asked import goes_on
from auditor.project.meaning.releases import Releases
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

COPYING = frozenset(
    {
        "clone",
        "copy",
        "tolist",
        "item",
        "tobytes",
        "float",
        "double",
        "max",
        "min",
        "sum",
        "mean",
        "norm",
        "cpu",
    }
)
"""Methods of a tensor or an array whose answer is another one, or a number."""

VIEWING = frozenset({"detach", "view", "reshape", "flatten", "squeeze", "contiguous"})
"""Methods before which a copy may be made of what they show."""

MEASURING = frozenset({"len", "float", "int", "sum", "max", "min", "bool"})

KEEPING = frozenset({"preload", "load", "warm", "keep", "hold", "pin", "attach", "open"})
"""Words of functions that mean to leave it so, whatever they answer."""

HOOKS = frozenset({"forward", "pre", "hook", "on", "prefetch", "begin", "start", "enter", "wait"})
"""Words of methods whose counterpart gives back."""


def only_read(recogniser: Releases, function: Function, call: ast.Call, protocol: str) -> ast.Return | None:
    """The way out with what was read."""
    ends, words = recogniser.ending_names(protocol), set(split(function.name))
    if not HOOKS.isdisjoint(words) or goes_on(function, call, ends):
        return None
    measured = KEEPING.isdisjoint(words) and _is_measured(function, call)
    if not (measured or _is_copied(function, call)):
        return None
    answers = [
        node for node in function.statements if isinstance(node, ast.Return) and node.value is not None
    ]
    taking = recogniser.taking_names(protocol)
    others = _others(recogniser, function, ends) if answers else iter(())
    return answers[-1] if any(_sees_to_its_own(each, taking, ends) for each in others) else None


def _is_copied(function: Function, call: ast.Call) -> bool:
    """`gather(p).float()`, `gather(p).detach().clone()`, `gather(p).to("cpu", copy=True)`"""
    return any(
        isinstance(node.func, ast.Attribute) and _copies(node, node.func) and _shown(node.func.value) is call
        for node in function.calls
    )


def _copies(call: ast.Call, method: ast.Attribute) -> bool:
    said = {each.arg: getattr(each.value, "value", None) for each in call.keywords}
    return method.attr in COPYING or (method.attr == "to" and said.get("copy") is True)


def _shown(value: ast.expr) -> ast.expr:
    """The thing itself, of which these are views."""
    match value:
        case ast.Call(func=ast.Attribute(value=inner, attr=way)) if way in VIEWING:
            return _shown(inner)
        case ast.Subscript(value=inner):
            return _shown(inner)
    return value


def _is_measured(function: Function, call: ast.Call) -> bool:
    """`data = maps.attach(name)`, and all that `data` is there for is `return len(data) // 2`."""
    names = {
        target.id for target, value in assignments(function) if value is call and isinstance(target, ast.Name)
    }
    if len(names) != 1:
        return False
    used = {id(node) for node in function.nodes if _is_read(node, names)}
    measured = {
        id(part)
        for each in function.calls
        if isinstance(each.func, ast.Name) and each.func.id in MEASURING
        for argument in each.args
        for part in walk(argument)
    }
    answered = {
        id(part)
        for node in function.statements
        if isinstance(node, ast.Return) and node.value is not None
        for part in walk(node.value)
    }
    return bool(used) and used <= measured and not used.isdisjoint(answered)


def _is_read(node: ast.AST, names: Set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)


def _others(recogniser: Releases, function: Function, ends: Set[str]) -> Iterator[Function]:
    project = recogniser.calls.model.project
    for path in sorted({path for end in ends for path, _ in project.mentioning(f"{end}(")}):
        module = project.module(path)
        yield from (each for each in list(module.by_node.values()) if each is not function) if module else ()


def _sees_to_its_own(function: Function, taking: Set[str], ends: Set[str]) -> bool:
    names = {last_name(call) for call in function.calls}
    return function.qualname != "<module>" and not names.isdisjoint(taking) and not names.isdisjoint(ends)

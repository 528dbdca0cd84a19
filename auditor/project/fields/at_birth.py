"""What a helper of constructors puts nothing, or a table, over was never there; nor was it where an object is
asked for the first time: `child = Sequence(...); child.inherit(parent)`."""

import ast
from collections.abc import Sequence, Set

from auditor.flow.lease import Leak
from auditor.project.code.bindings import given_to
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.forgetting import INITIAL
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor, ast.While)


def lost_after_birth(project: Project, drops: Sequence[Leak], family: Sequence[Function]) -> list[Leak]:
    """Without those of `init_stash()` of a mixin, which only constructors call, and on their own object; or
    others on one that they have just made."""
    made_as = {method.cls.name for method in family if method.cls is not None}
    return [
        drop
        for drop in drops
        if not any(_is_of_birth(project, each, made_as) for each in _around(drop, family))
    ]


def _around(drop: Leak, family: Sequence[Function]) -> list[Function]:
    return [
        method
        for method in family
        if method.module.path == drop.at.path
        and not isinstance(method.node, ast.Module)
        and method.node.lineno <= drop.at.line <= (method.node.end_lineno or 0)
    ]


def _is_of_birth(project: Project, method: Function, made_as: Set[str]) -> bool:
    paths = project.calling(method.name)
    modules = [module for module in project.parsed() if module.path in paths]
    if len(modules) < len(paths):
        return False  # a file that nobody has read
    callers = [
        (caller, call)
        for module in modules
        for caller in list(module.by_node.values())
        for call in caller.calls
        if last_name(call) == method.name
    ]
    return bool(callers) and all(
        (caller.name in INITIAL and _asks_itself(caller, call)) or _asks_new_one(caller, call, made_as)
        for caller, call in callers
    )


def _asks_itself(caller: Function, call: ast.Call) -> bool:
    """`self.init_stash()`, `super().init_stash()`, `LayerStash.init_stash(self)`."""
    of = getattr(call.func, "value", None)
    by_base = isinstance(of, ast.Call) and last_name(of) == "super"
    return by_base or any(getattr(each, "id", "") == caller.owner for each in (of, *call.args[:1]))


def _asks_new_one(caller: Function, call: ast.Call, made_as: Set[str]) -> bool:
    """In the same turn of the same loop in which it was made, and before anybody else has it."""
    of = getattr(call.func, "value", None)
    if isinstance(of, ast.Call):
        return last_name(of) in made_as
    made = list(given_to(caller, of.id)) if isinstance(of, ast.Name) else []
    if len(made) != 1 or not isinstance(made[0], ast.Call) or last_name(made[0]) not in made_as:
        return False
    first = made[0]
    if first.lineno >= call.lineno or _loop_around(caller, first) is not _loop_around(caller, call):
        return False
    between = (each for each in caller.calls if first.lineno <= each.lineno <= call.lineno)
    return not any(each is not call and _names(each, of) for each in between)


def _names(call: ast.Call, name: ast.expr | None) -> bool:
    return any(isinstance(each, ast.Name) and each.id == getattr(name, "id", "") for each in walk(call))


def _loop_around(caller: Function, node: ast.AST) -> ast.AST | None:
    """The innermost one."""
    loops = [each for each in caller.statements if isinstance(each, LOOPS)]
    around = [loop for loop in loops if any(part is node for each in loop.body for part in walk(each))]
    return max(around, key=lambda loop: loop.lineno, default=None)

"""What a helper of constructors puts nothing, or an empty table, over was never there."""

import ast
from collections.abc import Sequence

from auditor.flow.lease import Leak
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.forgetting import INITIAL
from auditor.project.meaning.sites import last_name


def lost_after_birth(project: Project, drops: Sequence[Leak], family: Sequence[Function]) -> list[Leak]:
    """Without those of `init_stash()` of a mixin, which only constructors call, and on their own object."""
    return [drop for drop in drops if not any(_is_of_birth(project, each) for each in _around(drop, family))]


def _around(drop: Leak, family: Sequence[Function]) -> list[Function]:
    return [
        method
        for method in family
        if method.module.path == drop.at.path
        and not isinstance(method.node, ast.Module)
        and method.node.lineno <= drop.at.line <= (method.node.end_lineno or 0)
    ]


def _is_of_birth(project: Project, method: Function) -> bool:
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
        caller.name in INITIAL and _asks_itself(caller, call) for caller, call in callers
    )


def _asks_itself(caller: Function, call: ast.Call) -> bool:
    """`self.init_stash()`, `super().init_stash()`, `LayerStash.init_stash(self)`."""
    of = getattr(call.func, "value", None)
    by_base = isinstance(of, ast.Call) and last_name(of) == "super"
    return by_base or any(getattr(each, "id", "") == caller.owner for each in (of, *call.args[:1]))

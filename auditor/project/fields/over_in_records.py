"""Records that are dicts, of which a method puts another lease over the one that is there: `record =
self.graphs[size]`, `record["pool"] = self.pools.acquire()` in `recapture(size)`."""

import ast
from collections.abc import Callable, Iterator, Sequence, Set

from auditor.flow.lease import StoredField
from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.filling_again import Filling, found_in_a_table
from auditor.project.fields.names_of_refillers import COMING_BACK, OPENED_AGAIN, follows_another
from auditor.project.fields.refilling import filled
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome, has_gone_to_the_caller
from auditor.source.nodes import walk

KEEPING = frozenset(
    {"append", "appendleft", "add", "put", "put_nowait", "extend", "insert", "push", "submit"}
)

Releases = Callable[[Function], Set[ast.Call]]


def over_in_records(
    outcome: Outcome, family: Sequence[Function], project: Project, releases: Releases
) -> Iterator[StoredField]:
    """By what the method is called there is one, and the method only works with that."""
    method = outcome.function
    again = follows_another(method.name, True) and not OPENED_AGAIN.match(method.name)
    if not again or COMING_BACK.match(method.name) or outcome.acquisition.foreign:
        return
    stored = {path for _, path in outcome.stored} | outcome.beside
    if len({path[-1] for path in stored}) != 1 or has_gone_to_the_caller(outcome):
        return
    for filling in _put_into_records(method, outcome.lease.holder):
        enders = [each for each in family if _ends(each, filling.field, releases(each))]
        if not enders or method in enders:
            continue
        if _only_worked_with(filling, family, releases(method)) and not _seen_to(filling, project, enders):
            yield filled(filling, enders)


def _put_into_records(method: Function, holder: str) -> Iterator[Filling]:
    for node in method.statements:
        for target, value in assigned_by(node):
            match target:
                case ast.Subscript(value=ast.Name(id=record), slice=ast.Constant(value=str() as part)):
                    its = holder and getattr(value, "id", "") == holder
                    if its and found_in_a_table(method, record) is not None:
                        yield Filling(method, record, part, node, target)


def _ends(method: Function, part: str, releases: Set[ast.Call]) -> bool:
    """`self.pools.release(record["pool"])`"""
    return any(_names_part(each, part) for call in releases for given in call.args for each in walk(given))


def _names_part(node: ast.AST, part: str) -> bool:
    match node:
        case (
            ast.Subscript(slice=ast.Constant(value=named))
            | ast.Call(func=ast.Attribute(attr="pop" | "get"), args=[ast.Constant(value=named), *_])
        ):
            return bool(named == part)
    return False


def _only_worked_with(filling: Filling, family: Sequence[Function], releases: Set[ast.Call]) -> bool:
    """Neither the record nor what is there is given a name, handed on, asked for, or ended."""
    method = filling.method
    worked = set(_looked_at(method, releases))
    for node in method.nodes:
        if node is filling.target:
            continue
        if _names_part(node, filling.field) and id(node) not in worked:
            return False
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(getattr(each, "id", "") == filling.owner for each in given):
                return False
            asked = own_attribute(node.func, method.owner or "")
            if asked and any(each.name == asked and _mentions(each, filling.field) for each in family):
                return False
    return True


def _looked_at(method: Function, releases: Set[ast.Call]) -> Iterator[int]:
    """What lies deeper in calls by themselves, `fresh.copy_(self.view(record["span"]))`, none of which may
    keep it or give it back."""
    for statement in method.statements:
        match statement:
            case ast.Expr(value=ast.Call() as call):
                calls = [each for each in walk(call) if isinstance(each, ast.Call)]
                if any(each in releases or looks_releasing(each) for each in calls):
                    continue
                if last_name(call) not in KEEPING:
                    direct = {id(each) for each in call.args}
                    yield from (id(each) for each in walk(call) if id(each) not in direct)


def _mentions(method: Function, part: str) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == part for node in method.nodes)


def _seen_to(filling: Filling, project: Project, enders: Sequence[Function]) -> bool:
    """A caller has to do with that part of the records, or ends them."""
    ending = {ender.name for ender in enders}
    name = filling.method.name
    modules = [module for module in project.parsed() if f"{name}(" in module.text]
    callers = [each for module in modules for each in list(module.by_node.values())]
    return any(
        caller is not filling.method
        and any(last_name(call) == name for call in caller.calls)
        and (_mentions(caller, filling.field) or any(last_name(call) in ending for call in caller.calls))
        for caller in callers
    )

"""`__exit__` that passes over the release by what was done in between: `if self.tokens == 0: return`,
`if self.session.calls == 0: return`, `if not self.dirty: return`. It runs once for each `with`."""

import ast
import copy
from collections.abc import Iterator, Set

from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import assignments, given_to, own_attribute
from auditor.project.code.entered import ENTERS, EXITS
from auditor.project.code.modules import Function, last_part
from auditor.project.code.project import Project
from auditor.project.fields.exits import (
    PROMISING,
    asks_for,
    begins_always,
    calls_with,
    what_decides,
)
from auditor.project.fields.exits_early import is_told_before, is_under_a_test
from auditor.project.fields.of_the_exception import is_of_the_exception
from auditor.project.fields.set_by_enders import beside_the_end, chains, may_end, set_later
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

STATES = frozenset({"acquired", "active", "alive", "bad", "broken", "committed", "complete", "completed",
                    "dead", "depth", "destroyed", "disposed", "done", "ended", "entered", "expired",
                    "finished", "freed", "given", "gone", "handed", "healthy", "held", "holding", "idle",
                    "invalid", "live", "locked", "lost", "moved", "ok", "open", "opened", "over", "pinned",
                    "refcount", "refs", "returned", "stale", "state", "status", "taken", "transferred",
                    "usable", "valid"})  # fmt: skip
"""Words that may say where the lease is, or that it is no good."""

MEASURING = frozenset({"len", "bool"})


def leaves_by_work_done(
    project: Project, method: Function, begun: Function, call: ast.Call, path: Path, ends: Set[str]
) -> bool:
    """All that decides are attributes that nobody sets who has a way to end the lease, and neither does who
    takes it. What the lease says of itself somebody must set. A container holds as many as were asked for,
    whoever asked."""
    own, field = method.owner, path[1][1:]
    several = ANY_ITEM in path
    if own is None or method.name not in EXITS or is_told_before(method, field):
        return False
    if not several and (begun.name not in ENTERS or is_under_a_test(begun, call)):
        return False
    if not several and not begins_always(begun, call, field):
        return False
    places = {field, *_filled_by(begun, call)}
    named = _Named(method)
    tests = [
        test
        for test in (named.visit(copy.deepcopy(each)) for each in what_decides(method, own, field))
        if not is_of_the_exception(test, method) and not any(asks_for(test, own, each) for each in places)
    ]
    some = [test for test in tests if _asks_for_some(test, method, field)]
    tests = [test for test in tests if test not in some]
    asked = [set(_asked_attributes(test, places)) for test in tests]
    of_itself = set() if len(path) > 2 else places
    return (
        bool(tests or some)
        and all(asked)
        and not any(_asks_more(test, own) for test in tests)
        and all(
            _is_set_by_bystanders(project, name, begun, ends, field, somebody=owner in of_itself)
            for owner, name in set().union(*asked)
        )
    )


class _Named(ast.NodeTransformer):
    """`self.row` for `row`, of `row, self.row = self.row, None`."""

    def __init__(self, method: Function) -> None:
        self.fields = {
            target.id: value
            for target, value in assignments(method)
            if isinstance(target, ast.Name) and own_attribute(value, method.owner or "")
        }

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.fields.get(node.id, node)


def _filled_by(begun: Function, call: ast.Call) -> Iterator[str]:
    """`slot` of `self.slot = self.slots.pin(self.key)`"""
    for target, value in assignments(begun):
        if any(each is call for each in walk(value)) and (name := own_attribute(target, begun.owner or "")):
            yield name


def _asked_attributes(test: ast.expr, places: Set[str]) -> Iterator[tuple[str, str]]:
    """`tokens` of `self.tokens == 0`, by itself; `calls` of `self.session.calls`, which is `session`'s."""
    for chain in chains(test):
        first, *rest = chain
        yield (first if rest else "", "" if not rest and first in places else chain[-1])


def _asks_for_some(test: ast.expr, method: Function, field: str) -> bool:
    """`not dirty`, of `dirty = [row for row in self.rows if row.dirty]`: the others are there as well."""
    match test:
        case ast.Name(id=name) | ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
            made = list(given_to(method, name))
            return bool(made) and all(_is_filtered(value, method.owner or "", field) for value in made)
    return False


def _is_filtered(value: ast.expr, own: str, field: str) -> bool:
    match value:
        case ast.ListComp(generators=[ast.comprehension(iter=whole, ifs=[_, *_])]):
            return own_attribute(whole, own) == field
    return False


def _asks_more(test: ast.expr, own: str) -> bool:
    """It calls something, or reads another name."""
    called = {last_part(node.func) for node in walk(test) if isinstance(node, ast.Call)}
    names = {node.id for node in walk(test) if isinstance(node, ast.Name)}
    return not called <= MEASURING or not names <= MEASURING | {own}


def _is_set_by_bystanders(
    project: Project, name: str, begun: Function, ends: Set[str], field: str, *, somebody: bool
) -> bool:
    """Nobody who sets it while the object is in use calls anything that ends such leases, or tells somebody
    of this one."""
    if not name or (PROMISING | STATES) & set(split(name)):
        return False
    setting = set_later(project, name)
    if setting is None or begun in setting or (somebody and not setting):
        return False
    told = any(True for each in setting for _ in calls_with(each, field))
    return not told and not any(may_end(each, ends) for each in beside_the_end(project, setting, begun, ends))

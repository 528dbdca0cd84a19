"""Objects with two ends of their own, of which one never speaks of a lease that the other gives back:
`commit()` checks `self.connection` in, and `abort()` writes a line to the log. Its callers call no more."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.lease import Field, StoredField
from auditor.ir.ops import ANY_ITEM
from auditor.project.code.bindings import own_attribute
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.comes_by_both import comes_by_both
from auditor.project.fields.counts_at_ends import ENDING_IT, own_helpers
from auditor.project.fields.one_end_forgets import callers
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import split

REVERTING = frozenset({"rollback", "roll", "back", "discard", "abandon", "undo", "revert"})

INSTEAD = (ENDING_IT | REVERTING) - {"expire", "reap"}

UNSEEN = frozenset({"__exit__", "__aexit__", "__del__"})
"""Ends that come without a call."""


def left_by_the_other_end(
    outcome: Outcome,
    stored: Sequence[StoredField],
    family: Sequence[Function],
    project: Project,
    calls: Calls,
) -> Iterator[StoredField]:
    """Where every caller of that end is known, and none of them comes by the other as well."""
    function, cls = outcome.function, outcome.function.cls
    own = {
        path[1:] for _, path in outcome.stored if path[0] == function.owner and path[2:] in ((), (ANY_ITEM,))
    }
    if cls is None or len(own) != 1 or len(stored) != 1 or outcome.acquisition.foreign:
        return
    ((attribute, *inside),) = own
    field = attribute[1:]
    enders = [each for each in family if each.qualname in stored[0].released_by]
    if not enders or len(enders) < len(stored[0].released_by):
        return
    names = {each.name for each in enders}
    if not names.isdisjoint(UNSEEN):
        return
    for method in family:
        overridden = method.cls is not cls and method.name in cls.methods
        if method is function or method.name in names or overridden:
            continue
        if not _ends_instead(method, field, names, family, listed=bool(inside)):
            continue
        asking = [
            (caller, call)
            for caller in callers(project, method)
            if caller.cls is not cls
            for call in caller.calls
            if last_name(call) == method.name and method in calls.targets(caller, call)[0]
            if not calls.guessed(caller, call)
        ]
        if asking and all(_leaves_it_at_that(caller, call, names) for caller, call in asking):
            where = Field(cls.qualname, "".join((field, *inside)))
            yield StoredField(where, outcome.lease.span, partly_by=(method.qualname,))
            return


def _ends_instead(
    method: Function, field: str, names: Set[str], family: Sequence[Function], *, listed: bool
) -> bool:
    """By its name, and with no more than a word for the reason; it does something, though nothing to the
    field, and gives neither itself nor anything else away. Beside a list of them it may give back what lies
    in another field."""
    own, whole = method.owner, set(split(method.name)) <= INSTEAD
    if own is None or not whole or method.name.startswith("_") or method.is_abstract:
        return False
    near = (method, *own_helpers(method, family))
    return not any(
        field in each.text
        or any(
            (looks_releasing(call) and not listed) or last_name(call) in names or _is_told_of(call, own)
            for call in each.calls
        )
        for each in near
    )


def _is_told_of(call: ast.Call, own: str) -> bool:
    """`self.owner.forget(self)`, `super().abort()`, and whatever `getattr(self, name)` may be."""
    given = (*call.args, *(keyword.value for keyword in call.keywords))
    return any(getattr(each, "id", "") == own for each in given) or last_name(call) == "super"


def _leaves_it_at_that(caller: Function, call: ast.Call, names: Set[str]) -> bool:
    """Of a name of its own, which it does not return, and of which no way meets the other end."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=name)) if name not in caller.parameters:
            ends = (each for each in caller.calls if own_attribute(each.func, name) in names)
            answers = (node.value for node in caller.nodes if isinstance(node, ast.Return))
            returned = any(getattr(each, "id", "") == name for each in answers)
            return not returned and not any(comes_by_both(caller, call, each) for each in ends)
    return False

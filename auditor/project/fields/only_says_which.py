"""Calls that are told which leases they are, by a part of each:
`client.move(job.lease.token, lease.token)`."""

import ast
from collections.abc import Mapping, Sequence, Set

from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING, looks_releasing
from auditor.project.fields.filling_again import Filling, names_in
from auditor.project.meaning.sites import last_name


def only_says_which(
    part: ast.Attribute,
    parents: Mapping[int, ast.AST],
    filling: Filling,
    family: Sequence[Function],
    ends: Set[str],
) -> bool:
    """The call is told the same of what is put in its place, and does not end it by its name; leases of the
    field are given back as a whole."""
    call, value = parents.get(id(part)), getattr(filling.statement, "value", None)
    if not isinstance(call, ast.Call) or part not in call.args or filling.key is not None:
        return False
    if last_name(call) in ends or looks_releasing(call) or ENDING.search(last_name(call)):
        return False
    new = names_in(value) if isinstance(value, ast.expr) else set()
    told = any(
        isinstance(each, ast.Attribute) and each.attr == part.attr and getattr(each.value, "id", "") in new
        for each in call.args
    )
    return told and _is_ended_whole(filling.field, family, ends)


def _is_ended_whole(field: str, family: Sequence[Function], ends: Set[str]) -> bool:
    """`leases.retire(job.lease)`, and nowhere `leases.retire(job.lease.token)`."""
    given = [
        each
        for method in family
        for call in method.calls
        if last_name(call) in ends
        for each in call.args
        if isinstance(each, ast.Attribute)
    ]
    in_part = any(getattr(each.value, "attr", "") == field for each in given)
    return any(each.attr == field for each in given) and not in_part

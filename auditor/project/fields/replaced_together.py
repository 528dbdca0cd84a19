"""Two fields that a method fills anew, where it has ended what lay in one of them: `self.data.close()`, and
then `self.data = open(a)`, `self.index = open(b)`. It is called again, and what lay in the other is lost."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import STORING


def ends_another_first(method: Function, attribute: str, ends: Set[str]) -> bool:
    """Whether it gives back what another field holds above the line that fills that, and never speaks of an
    end of what this one holds."""
    own = method.owner or ""
    if any(field == attribute for _, field in _ended(method, own, ends)) or _is_kept(method, own, attribute):
        return False
    filled = {
        field: target.lineno
        for target, value in assignments(method)
        if (field := own_attribute(target, own)) is not None and not isinstance(value, ast.Constant)
    }
    ended = [(line, field) for line, field in _ended(method, own, ends) if field in filled]
    return attribute in filled and any(line < filled[field] for line, field in ended)


def _is_kept(method: Function, own: str, attribute: str) -> bool:
    """`self.former.append(self.index)`, `last = self.index`"""
    told = (each for call in method.calls if last_name(call) in STORING for each in call.args)
    named = (value for _, value in assignments(method))
    return any(
        own_attribute(part, own) == attribute
        for each in (*told, *named)
        for part in (each.elts if isinstance(each, ast.Tuple | ast.List) else [each])
    )


def _ended(method: Function, own: str, ends: Set[str]) -> Iterator[tuple[int, str]]:
    """Fields that a call ends, or what another name for them stands for, with its line."""
    names = {
        target.id: field
        for target, value in assignments(method)
        if isinstance(target, ast.Name) and (field := own_attribute(value, own)) is not None
    }
    for call in method.calls:
        if not (looks_releasing(call) or last_name(call) in ends):
            continue
        asked = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        for each in (*call.args, *asked):
            field = own_attribute(each, own) or names.get(getattr(each, "id", ""))
            if field is not None:
                yield call.lineno, field

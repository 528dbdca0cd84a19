"""Objects that end what is in them themselves, of which a class ends one and forgets another: `stop()` calls
`self.link.close()`, and nothing calls `self.side.close()`."""

import ast
from collections.abc import Sequence, Set

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.in_others import only_worked_with


def ends_others_alone(project: Project, family: Sequence[Function], field: str, ends: Set[str]) -> bool:
    """Whether one of these ends is called of another field of the class, and nobody in the tree does more
    than work with what is in this one."""
    ended = {
        own_attribute(call.func.value, each.owner or "")
        for each in family
        for call in each.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ends
    } - {None}
    return bool(ended) and field not in ended and only_worked_with(project, field, ends=ends)

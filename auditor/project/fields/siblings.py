"""Objects of which whoever ends them gives back other fields: `finish(request)` frees the request's pages,
and never looks at its draft."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Set

from auditor.ir.ops import Path
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project
from auditor.project.fields.elsewhere import released_attributes

GivesBack = Callable[[Function, ast.Call], bool]
"""Whether a call in that function gives something back to any pool of the tree."""

CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def ends_its_siblings(
    project: Project, place: Path, family: Iterable[Function], gives_back: GivesBack
) -> Iterator[Function]:
    """Those of the `family`, who are where the field is filled, that give back another field of an object of
    a class that has this one as well, and methods of that class that do so. Of a class that the tree does not
    have, others may know."""
    field, family = place[1][1:], list(family)
    _read_declarations(project, field, {function.module.text for function in family})
    owners = [
        cls for module in project.parsed() if field in module.text for cls in _owners(module.classes, field)
    ]
    fields = set().union(*map(_fields, owners))
    enders = [*family, *(method for cls in owners for method in cls.methods.values())]
    for function in enders:
        own = function.owner if function.cls not in owners else None
        known = {call for call in function.calls if gives_back(function, call)}
        for other, bases in released_attributes(function, of_others=False, known=known).items():
            if other != field and bases - {own} and other in fields:
                yield function
                break


def _read_declarations(project: Project, field: str, asking: Set[str]) -> None:
    """Files that do nothing but describe such objects lead to no pool, so that nobody has read them yet. Only
    those are read whose classes the texts `asking` speak of."""
    declared = re.compile(rf"^\s+{field}\s*:", re.MULTILINE)
    for path, text in project.mentioning(field):
        if declared.search(text) is not None:
            classes = CLASS.findall(text)
            if any(name in other for name in classes for other in asking):
                project.module(path)


def _owners(classes: dict[str, Class], field: str) -> Iterator[Class]:
    return (cls for cls in classes.values() if field in _fields(cls))


def _fields(cls: Class) -> set[str]:
    """What the class is told of, or its methods put into its objects."""
    listed = {
        statement.target.id
        for statement in cls.node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return listed | {
        node.attr
        for method in cls.methods.values()
        for node in method.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if getattr(node.value, "id", None) == method.owner
    }

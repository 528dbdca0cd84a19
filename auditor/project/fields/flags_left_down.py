"""Flags that stay as they are: of a class that nobody ever raises, `self._owned = False` at birth and nothing
else ever; or that only the constructor sets."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function, Module
from auditor.project.code.project import Project
from auditor.project.fields.exits import OWNING
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

_COMMENT = re.compile(r"#.*")


def flags_left_down(project: Project, family: Sequence[Function]) -> frozenset[str]:
    """Some method sets each of them to False, and nothing in the tree sets a field so named of such an
    object to something else, or quotes its name."""
    lowered = {field for method in family for field in _lowered(method)}
    return frozenset(field for field in lowered if not _is_raised(project, field, family))


def set_at_birth(facts: Iterable[tuple[str, bool]], family: Sequence[Function]) -> Iterator[tuple[str, bool]]:
    """Those that are about fields which the constructor sets and nobody else does: `.enabled`."""
    written = {
        node.attr
        for each in family
        if each.name not in ("__init__", "__post_init__")
        for node in each.nodes
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }
    return ((key, says) for key, says in facts if key[1:] not in written)


def _lowered(method: Function) -> Iterator[str]:
    for target, value in assignments(method):
        field = own_attribute(target, method.owner or "")
        if field is not None and _is_false(value) and (field.startswith("_") or OWNING & set(split(field))):
            yield field


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _is_raised(project: Project, field: str, family: Sequence[Function]) -> bool:
    quoted = re.compile(rf"[\"']{field}[\"']|(?<![.\w]){field}\b")
    read = {module.path: module for module in project.parsed()}
    for path, text in project.mentioning(field):
        if path not in read or quoted.search(_COMMENT.sub("", text)) or _sets(read[path], field, family):
            return True
    return False


def _sets(module: Module, field: str, family: Sequence[Function]) -> bool:
    """Methods of another class may set their own of that name."""
    functions = list(module.by_node.values())
    others = [each for each in functions if each.cls is not None and each not in family]
    known = {id(target) for each in family for target, value in assignments(each) if _is_false(value)}
    known |= {id(node) for each in others for node in each.nodes if _is_own(node, each)}
    stores = (node for node in walk(module.tree) if isinstance(node, ast.Attribute) and node.attr == field)
    return any(isinstance(node.ctx, ast.Store) and id(node) not in known for node in stores)


def _is_own(node: ast.AST, method: Function) -> bool:
    return isinstance(node, ast.expr) and own_attribute(node, method.owner or "") is not None

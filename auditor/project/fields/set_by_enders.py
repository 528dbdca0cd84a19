"""Who sets an attribute while its object is in use: where he ends leases too, that may be what it tells."""

import ast
import re
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.modules import Function, last_part
from auditor.project.code.project import Project
from auditor.source.nodes import walk

_SET = r"\.{0}\s*(?:\[[^\]\n]*\]\s*)?(?:[-+|&*/]|//)?=(?!=)|\.{0}\.(?:append|add|update|extend)\("


def set_by_enders(project: Project, tests: Sequence[ast.expr], begun: Function, ends: Set[str]) -> bool:
    """Whether something that the tests ask of other objects is set by who calls one of these. `begun` takes
    such leases."""
    asked = {chain[-1] for test in tests for chain in chains(test) if len(chain) > 1}
    setting = [each for name in sorted(asked) for each in set_later(project, name) or ()]
    return any(may_end(each, ends) for each in beside_the_end(project, setting, begun, ends))


def beside_the_end(
    project: Project, setting: Sequence[Function], begun: Function, ends: Set[str]
) -> list[Function]:
    """Without the end itself, which winds back what it gets: `buffer.used = 0`. Not where somebody who makes
    such objects may have asked it: `with Staged(pool) as buffer: ... pool.checkin(buffer)`."""
    if not any(each.name in ends for each in setting) or _is_asked_within(project, begun, ends):
        return list(setting)
    return [each for each in setting if each.name not in ends]


def _is_asked_within(project: Project, begun: Function, ends: Set[str]) -> bool:
    name = begun.cls.name if begun.cls is not None else ""
    modules = [project.module(path) for path, _ in project.mentioning(f"{name}(")] if name else []
    return not modules or any(
        f"{name}(" in function.text and any(last_part(call.func) in ends for call in function.calls)
        for module in modules
        for function in (list(module.by_node.values()) if module is not None else ())
        if function.qualname != "<module>"
    )


def set_later(project: Project, name: str) -> list[Function] | None:
    """The functions but for constructors that set an attribute of this name; None where a file was not read
    that does so."""
    written = re.compile(_SET.format(name))
    read = {module.path: module for module in project.parsed()}
    found: list[Function] = []
    for path, text in project.mentioning(name):
        if written.search(text) is None:
            continue
        if path not in read:
            return None
        found += [each for each in read[path].by_node.values() if written.search(each.text)]
    return [each for each in found if each.name not in ("__init__", "__post_init__")]


def may_end(function: Function, ends: Set[str]) -> bool:
    """It is one of these, or calls one."""
    return function.name in ends or any(last_part(call.func) in ends for call in function.calls)


def chains(test: ast.expr) -> Iterator[list[str]]:
    """`session`, `calls` of each `self.session.calls`."""
    inner = {id(node.value) for node in walk(test) if isinstance(node, ast.Attribute)}
    for node in walk(test):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield _chain(node)


def _chain(node: ast.expr) -> list[str]:
    found: list[str] = []
    while isinstance(node, ast.Attribute):
        found.append(node.attr)
        node = node.value
    return found[::-1]

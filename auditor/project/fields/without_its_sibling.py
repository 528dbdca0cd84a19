"""Ends that give two things back, and only one of them where they return early:

if self.report is None:
    self.events.restore(self.end)
    return
self.report(self.start.elapsed_time(self.end))
self.events.restore(self.start)
self.events.restore(self.end)"""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import own_attribute, suites_of
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def returns_without_it(method: Function, field: str, ends: Set[str]) -> bool:
    """What stands between says nothing of the field, and gives back another one that goes with it later."""
    own = method.owner or ""
    for suite in suites_of(method.node):
        for at, node in enumerate(suite):
            if not isinstance(node, ast.If) or node.orelse or not isinstance(node.body[-1], ast.Return):
                continue
            early, later = (
                set(_given_back(node.body, own, ends)),
                set(_given_back(suite[at + 1 :], own, ends)),
            )
            if field in later and early & later and not _speaks_of(node, own, field):
                return not any(_speaks_of(each, own, field) for each in suite[:at] if not _asks(each))
    return False


def _given_back(suite: Sequence[ast.stmt], own: str, ends: Set[str]) -> Iterator[str]:
    """`start` of `self.events.restore(self.start)` and of `self.start.close()`."""
    for node in (inner for each in suite for inner in walk(each)):
        if isinstance(node, ast.Call) and last_name(node) in ends and isinstance(node.func, ast.Attribute):
            for given in (node.func.value, *node.args):
                name = own_attribute(given, own)
                if name is not None:
                    yield name


def _speaks_of(node: ast.AST, own: str, field: str) -> bool:
    return any(isinstance(each, ast.Attribute) and own_attribute(each, own) == field for each in walk(node))


def _asks(node: ast.stmt) -> bool:
    """`if self.start is None or self.end is None: return`: from there on there are both."""
    return isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return | ast.Raise)

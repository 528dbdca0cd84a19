"""What an entry of a table is asked before it is used again, `if row is not None and row.fit: return row`,
and whether somebody who turned that has ended the entry as well, and left it there."""

import ast
import re
from collections.abc import Callable, Iterator, Set

from auditor.project.code.bindings import awaited, given_to
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import ENDING, looks_releasing
from auditor.project.fields.outgrown import CLOCKS
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

ENDS = re.compile(rf"(?:^|_)(?:{ENDING.pattern})")
"""At the beginning of a word, and not in `send`."""

MEASURES = frozenset({"numel", "nelement", "element_size", "size", "dim"})
"""Methods of tensors that say how large they are; no end changes that."""

Lent = Callable[[Function, ast.Call], bool]
"""Whether a call takes something out of a pool."""


def may_have_ended(
    asked: Set[ast.Attribute], method: Function, project: Project, ends: Set[str], is_lent: Lent
) -> bool:
    """`ends` are the names of what gives back to the pool. Who lent it for himself ends what is his own. A
    measure that is compared with what the method is told is no flag, `row.width >= width`, and says so only
    where an end sets it."""
    names = {node.attr for node in asked}
    measures = names - {node.attr for node in asked - _measures(asked, method)}
    called = {id(call.func) for call in method.calls}
    if any(id(node) in called and node.attr not in MEASURES for node in asked) or CLOCKS & {
        *_words(method, asked)
    }:
        return True
    functions = [each for module in project.parsed() for each in list(module.by_node.values())]
    if any(each.name in names for each in functions) or _is_set_in_other_files(names, project):
        return True
    return any(
        node.attr not in measures or function.name in ends or ENDS.search(function.name)
        for function in functions
        for node in _turned(function, names)
        if _ends(function, node.value, ends, is_lent)
    )


def _measures(asked: Set[ast.Attribute], method: Function) -> set[ast.Attribute]:
    """Those that are compared with parameters, which the caller has no clock in."""
    told = set(method.parameters) - {method.owner}
    found = set[ast.Attribute]()
    for node in method.nodes:
        match node:
            case ast.Compare(left=left, ops=[_], comparators=[right]):
                for one, other in ((left, right), (right, left)):
                    names = {each.id for each in walk(other) if isinstance(each, ast.Name)}
                    if isinstance(one, ast.Attribute) and one in asked and names and names <= told:
                        found.add(one)
    return found


def _words(method: Function, asked: Set[ast.Attribute]) -> Iterator[str]:
    """Of what it is compared with, too: `row.good_until > now`."""
    yield from (word for node in asked for word in split(node.attr))
    for node in method.nodes:
        if isinstance(node, ast.Compare) and any(each in asked for each in walk(node)):
            yield from (word for each in walk(node) for word in split(getattr(each, "id", "")))


def _is_set_in_other_files(names: Set[str], project: Project) -> bool:
    """That nobody has read."""
    read = {module.path for module in project.parsed()}
    return any(path not in read for name in names for path, _ in project.mentioning(f".{name} ="))


def _turned(function: Function, names: Set[str]) -> Iterator[ast.Attribute]:
    for node in function.nodes if any(f".{name}" in function.text for name in names) else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in names:
            yield node


def _ends(function: Function, it: ast.expr, ends: Set[str], is_lent: Lent) -> bool:
    """`line.fit = False`, and `pool.give_back(line)`; a method of the line that is called an end, or one of
    the pool, which may write off what is lent."""
    if function.cls is not None and not ends.isdisjoint(function.cls.methods):
        return True
    if isinstance(it, ast.Name) and it.id == function.owner:
        return ENDS.search(function.name) is not None
    ending = [each for each in function.calls if _is_end(each, ends)]
    if not isinstance(it, ast.Name):
        return bool(ending)
    given = list(given_to(function, it.id))
    own = bool(given) and all(any(is_lent(function, call) for call in _calls_in(value)) for value in given)
    told = (each for call in ending for each in walk(call))
    return not own and any(isinstance(each, ast.Name) and each.id == it.id for each in told)


def _is_end(call: ast.Call, ends: Set[str]) -> bool:
    return last_name(call) in ends or looks_releasing(call) or ENDS.search(last_name(call)) is not None


def _calls_in(value: ast.expr) -> Iterator[ast.Call]:
    """Of the answer itself, awaited or not."""
    inner = awaited(value)
    if isinstance(inner, ast.Call):
        yield inner

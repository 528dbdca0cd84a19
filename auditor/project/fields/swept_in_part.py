"""Lists that are gone over for the last time, where some entries are not given back by what they are
otherwise: `for row, size in self.waiting: if size > 0: self.rows.put(row)`, and then `self.waiting = []`.

Entries are tuples, so that nobody has noted in them since that they went already."""

import ast
import re
from collections.abc import Iterator, Set

from auditor.project.code.bindings import own_attribute, suites_of
from auditor.project.code.modules import Class, Function
from auditor.project.fields.cleared_beside_others import empties
from auditor.project.fields.half_emptied import TELLING
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

ADDING = frozenset({"append", "appendleft", "add"})


def swept_in_part(
    method: Function, attribute: str, part: int, ends: Set[str], storing: Function
) -> Iterator[ast.stmt]:
    """The statements that let go of those which were passed over. `part` is the lease's place in an entry."""
    for suite in suites_of(method.node):
        for at, node in enumerate(suite):
            match node:
                case ast.For(target=ast.Tuple(elts=elements), iter=over, orelse=[]):
                    pass
                case _:
                    continue
            if own_attribute(over, method.owner or "") != attribute or part >= len(elements):
                continue
            names = [each.id if isinstance(each, ast.Name) else "" for each in elements]
            tested = _passed_over(node.body, names[part], ends)
            asked = [names.index(each) for each in tested if each in names]
            if len(tested) == 1 and asked and _is_unasked(storing, attribute, asked[0], names):
                yield from (each for each in suite[at + 1 :] if empties(each, method.owner or "", attribute))


FAILED = re.compile(r"err|exc|fail|bad|broken|corrupt|lost|invalid|reset|abort|cancel")
"""Words in the fields that say that the work with a lease went wrong."""


def is_swept(method: Function, attribute: str, taken: ast.AST, storing: Function) -> bool:
    """Whether that is the end of a loop over tuples of which some are asked apart: which of these have a
    lease at all, their other parts may say, unless all come from the one store of the lease."""
    loops = [node for node in method.statements if isinstance(node, ast.For)]
    if storing.cls is method.cls and method.cls is not None and _is_filled_once(method.cls, attribute):
        tests = [each.test for loop in loops for each in loop.body if isinstance(each, ast.If)]
        if all(isinstance(t, ast.Compare) and isinstance(t.ops[0], ast.In | ast.NotIn) for t in tests):
            return False  # by its name the caller says which
        if _only_asks_what_nobody_asked(method, attribute, storing):
            return False
        if any(_goes_on_by_a_failure(each) for loop in loops for each in loop.body):
            return False
    asking = any(
        isinstance(loop.target, ast.Tuple)
        and own_attribute(loop.iter, method.owner or "") == attribute
        and any(isinstance(each, ast.If) for each in loop.body)
        for loop in loops
    )
    writes = isinstance(taken, ast.Attribute) and own_attribute(taken, method.owner or "") == attribute
    return asking and (writes or getattr(getattr(taken, "func", None), "attr", "") == "clear")


def _only_asks_what_nobody_asked(method: Function, attribute: str, storing: Function) -> bool:
    """Where all entries are gone afterwards."""
    loops = [
        node
        for node in method.statements
        if isinstance(node, ast.For) and own_attribute(node.iter, method.owner or "") == attribute
    ]
    emptied = any(empties(each, method.owner or "", attribute) for each in method.statements)
    return emptied and bool(loops) and all(asks_what_nobody_asked(each, attribute, storing) for each in loops)


def asks_what_nobody_asked(loop: ast.For, attribute: str, storing: Function) -> bool:
    """`for request, slot in self.batch: if request is None: continue` of what came with each of the leases:
    that says nothing of the lease."""
    elements = loop.target.elts if isinstance(loop.target, ast.Tuple) else []
    names = [each.id for each in elements if isinstance(each, ast.Name)]
    asked = [
        names.index(part.id)
        for each in loop.body
        if isinstance(each, ast.If)
        for part in walk(each.test)
        if isinstance(part, ast.Name) and part.id in names
    ]
    return bool(asked) and all(_is_unasked(storing, attribute, each, names) for each in asked)


def _goes_on_by_a_failure(statement: ast.stmt) -> bool:
    """`if event.error is not None: log(event.error); continue`: it has one like all others."""
    match statement:
        case ast.If(test=test, body=[*_, ast.Continue()]):
            return any(isinstance(part, ast.Attribute) and FAILED.search(part.attr) for part in walk(test))
    return False


def _is_filled_once(cls: Class, attribute: str) -> bool:
    """In one place of the class, which asks before whether there is a lease."""
    filling = [
        call
        for method in cls.methods.values()
        for call in method.calls
        if last_name(call) in ADDING
        and isinstance(call.func, ast.Attribute)
        and own_attribute(call.func.value, method.owner or "") == attribute
    ]
    return len(filling) == 1


def _passed_over(body: list[ast.stmt], lease: str, ends: Set[str]) -> Set[str]:
    """The names that decide alone whether a turn gives back its lease, where it does nothing else with it."""
    branches = [each for each in body if isinstance(each, ast.If)]
    if not lease or len(branches) != 1 or branches[0].orelse:
        return frozenset()
    branch = branches[0]
    beside = [each for each in body if each is not branch]
    jumps = [type(each) for each in branch.body if isinstance(each, ast.Continue)]
    within, without = (beside, branch.body) if jumps else (branch.body, beside)
    if not any(_gives_back(each, lease, ends) for each in within) or any(
        _reads(each, lease) for each in without
    ):
        return frozenset()
    if any(isinstance(node, ast.Break | ast.Return | ast.Raise) for each in body for node in walk(each)):
        return frozenset()
    return _asked_by(branch.test, lease)


def _asked_by(test: ast.expr, lease: str) -> Set[str]:
    """`size > 0`, `size`, `not size`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _asked_by(inner, lease)
        case ast.Name(id=name) | ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=int())]):
            plain = TELLING.isdisjoint(split(name)) and name != lease
            return frozenset({name} if plain else ())
    return frozenset()


def _gives_back(statement: ast.stmt, lease: str, ends: Set[str]) -> bool:
    return any(
        isinstance(node, ast.Call)
        and last_name(node) in ends
        and any(getattr(given, "id", "") == lease for given in node.args)
        for node in walk(statement)
    )


def _reads(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in walk(statement))


def _is_unasked(storing: Function, attribute: str, at: int, names: list[str]) -> bool:
    """What decides is a measure of what came with the lease, which the storing function has not looked at,
    and no mark that it puts there, or another method."""
    entries = [entry for method in _family(storing) for entry in _added(method, attribute)]
    own = list(_added(storing, attribute))
    if len(entries) != 1 or len(own) != 1 or len(own[0].elts) != len(names):
        return False
    read = {node.id for node in walk(own[0].elts[at]) if isinstance(node, ast.Name)} - {"len"}
    asking = (node.test for node in storing.nodes if isinstance(node, ast.If | ast.IfExp | ast.While))
    asked = {node.id for test in asking for node in walk(test) if isinstance(node, ast.Name)}
    return bool(read) and read <= set(storing.parameters) and read.isdisjoint(asked)


def _family(storing: Function) -> Iterator[Function]:
    yield from storing.cls.methods.values() if storing.cls is not None else (storing,)


def _added(method: Function, attribute: str) -> Iterator[ast.Tuple]:
    for call in method.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=whole, attr=way), args=[*entry]) if way in ADDING:
                if own_attribute(whole, method.owner or "") == attribute:
                    yield entry[0] if len(entry) == 1 and isinstance(entry[0], ast.Tuple) else ast.Tuple([])

"""Methods that run for one after the other.

Those that give their caller another one each time: `self.port = self.ports.reserve()` and
`return self.port` in `new_round()`. That the caller has it too does not make it his, where the object itself
ends the last one."""

import ast
import re
from collections.abc import Sequence
from itertools import repeat

from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, before, tests_in
from auditor.project.fields.reckoning import takes_out
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

ANOTHER = frozenset({"new", "next", "fresh", "another"})
"""First words of what such methods are called."""


def is_another_one_each_time(filling: Filling, enders: Sequence[Function]) -> bool:
    """It is told nothing, answers with what is in the field, and each end asks whether there is one, and
    leaves none there."""
    method = filling.method
    first = next(iter(split(method.name)), "")
    if first not in ANOTHER or filling.key is not None or len(method.parameters) != 1:
        return False
    answers = [node.value for node in method.statements if isinstance(node, ast.Return)]
    shown = bool(answers) and all(_is_field(each, filling.owner, filling.field) for each in answers)
    return shown and all(_asks(ender, filling.field) and takes_out(ender, filling.field) for ender in enders)


def is_of_the_next(call: ast.Call, method: Function) -> bool:
    """`self.shard = open(self.paths.pop(0))`, or `open(self.paths[index])` of an index that is told: whoever
    goes on to the next calls it once for each."""
    own = method.owner or ""
    told = [*call.args, *(each.value for each in call.keywords)]
    return any(
        _takes_out_of_its_own(node, own) or _is_chosen(node, own, method)
        for each in told
        for node in walk(each)
    )


def is_one_of_a_folder(call: ast.Call, method: Function) -> bool:
    """`open(self.root / f"{step}.log")` of a step that is told: in its own folder lies one for each."""
    own, told = method.owner or "", set(method.parameters[1:])
    for path in call.args[:1]:
        names = {node.id for node in walk(path) if isinstance(node, ast.Name)}
        folder = any(isinstance(each, ast.expr) and own_attribute(each, own) for each in walk(path))
        written = any(isinstance(each, ast.JoinedStr) for each in walk(path))
        if folder and written and names & told:
            return True
    return False


WHICH = re.compile(r"(?:\w+_)?(?:path|file|filename|fname|name|tag|url|version)")


def is_told_which_one(call: ast.Call, method: Function) -> bool:
    """`self.overlay = open_shard(path)`, `self.words = cache.acquire(self.root / filename)`: of what is
    called by a name there are several."""
    told = {name for name in method.parameters[1:] if WHICH.fullmatch(name)}
    return any(
        isinstance(node, ast.Name) and node.id in told for each in call.args[:1] for node in walk(each)
    )


def is_told_the_path(call: ast.Call, method: Function) -> bool:
    """`self.mirror = open(path, "a")` of a path that is told."""
    return bool(call.args) and isinstance(call.args[0], ast.Name) and call.args[0].id in method.parameters[1:]


def _is_chosen(node: ast.AST, own: str, method: Function) -> bool:
    match node:
        case ast.Subscript(value=store, slice=ast.Name(id=index)):
            return own_attribute(store, own) is not None and index in method.parameters
    return False


def is_of_another_now(filling: Filling) -> bool:
    """`if day != self.day: self.file = open(day); self.day = day`: it is filled whenever that has changed."""
    for node in filling.method.statements:
        match node:
            case ast.If(test=ast.Compare(left=one, ops=[ast.NotEq()], comparators=[other]), body=body):
                noted = {ast.unparse(one), ast.unparse(other)}
            case _:
                continue
        beside = (given for statement in body for given in assigned_by(statement))
        if filling.statement in body and any(_notes(*given, noted, filling.owner) for given in beside):
            return not any(map(_may_see_to_it, before(filling), repeat(filling)))
    return False


def _may_see_to_it(node: ast.AST, filling: Filling) -> bool:
    """It speaks of the field, or calls a method of the same object."""
    called = own_attribute(node.func, filling.owner) if isinstance(node, ast.Call) else None
    methods = filling.method.cls.methods if filling.method.cls is not None else {}
    return called in methods or (
        isinstance(node, ast.expr) and own_attribute(node, filling.owner) == filling.field
    )


def _notes(to: ast.expr, value: ast.expr, noted: set[str], own: str) -> bool:
    return own_attribute(to, own) is not None and {ast.unparse(to), ast.unparse(value)} == noted


def _takes_out_of_its_own(node: ast.AST, own: str) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=store, attr="pop" | "popleft" | "get_nowait")):
            return own_attribute(store, own) is not None
        case ast.Call(func=ast.Name(id="next"), args=[store, *_]):
            return own_attribute(store, own) is not None
    return False


def _is_field(answer: ast.expr | None, owner: str, field: str) -> bool:
    return answer is not None and own_attribute(answer, owner) == field


def _asks(ender: Function, field: str) -> bool:
    own = ender.owner or ""
    return any(
        isinstance(each, ast.expr) and own_attribute(each, own) == field
        for test in tests_in(list(ender.nodes))
        for each in walk(test)
    )

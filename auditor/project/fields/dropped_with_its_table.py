"""Objects that take a lease when it is wanted, and lie in a table of another class: `delete(key)` takes one
out and ends it, and `expire()` strikes others off, `del self.chats[key]`, which nobody ends then."""

import ast
import re
from collections.abc import Iterator, Sequence, Set

from auditor.flow.lease import Field, StoredField
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project
from auditor.project.fields.ends_without import drops
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.one_end_forgets import callers
from auditor.project.fields.record_places import takes_from
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome

OVER = re.compile(
    r"(?:^|_)(?:done|closed|ended|finished|over|dead|alive|active|empty|idle|state|status)(?:_|$)"
)
"""What a test asks of those that have ended by themselves."""


def dropped_with_its_table(
    outcome: Outcome, stored: Sequence[StoredField], project: Project
) -> Iterator[StoredField]:
    """Where methods of the object's own class give the lease back, and one of them is how the table's class
    ends what it takes out elsewhere."""
    cls = outcome.function.cls
    own = {path[1][1:] for _, path in outcome.stored if len(path) == 2 and path[0] == outcome.function.owner}
    if cls is None or len(own) != 1 or len(stored) != 1 or outcome.acquisition.foreign:
        return
    (field,) = own
    ends = {name.rpartition(".")[2] for name in stored[0].released_by}
    telling = {field, *_set_by(each for name, each in cls.methods.items() if name in ends)}
    for keeper, table in _keepers(project, cls):
        methods = [each for name, each in sorted(keeper.methods.items()) if name not in INITIAL]
        if not any(_ends_one(method, table, ends) for method in methods):
            continue
        for method in methods:
            near = (method, *callers(project, method))
            if any(last_name(call) in ends for each in near for call in each.calls):
                continue
            if takes_from(method, {table}) and drops(method, table) and not _asks_for(method, telling):
                where = Field(cls.qualname, field)
                yield StoredField(where, outcome.lease.span, partly_by=(method.qualname,))
                return


def _set_by(methods: Iterator[Function]) -> Iterator[str]:
    """Fields by which an end tells that it has been."""
    for method in methods:
        for target, _ in assignments(method):
            if (name := own_attribute(target, method.owner or "")) is not None:
                yield name


def _keepers(project: Project, cls: Class) -> Iterator[tuple[Class, str]]:
    """Classes with a table of such objects, and its name: `self.chats[key] = Chat(key)`,
    `self.chats.setdefault(key, Chat(key))`, or by a local name."""
    for module in project.parsed():
        if f"{cls.name}(" not in module.text:
            continue
        for _, keeper in sorted(module.classes.items()):
            tables = {table for each in keeper.methods.values() for table in _tables(each, cls.name)}
            yield from ((keeper, table) for table in sorted(tables) if keeper is not cls)


def _tables(method: Function, made: str) -> Iterator[str]:
    own = method.owner or ""
    named = {
        target.id
        for target, value in assignments(method)
        if isinstance(target, ast.Name) and _is_made(value, made, set())
    }
    for target, value in assignments(method):
        table = own_attribute(target.value, own) if isinstance(target, ast.Subscript) else None
        if table is not None and _is_made(value, made, named):
            yield table
    for call in method.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=place, attr="setdefault"), args=[_, value]):
                if _is_made(value, made, named) and (table := own_attribute(place, own)) is not None:
                    yield table


def _is_made(value: ast.expr, made: str, named: Set[str]) -> bool:
    match value:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name == made
        case ast.Name(id=name):
            return name in named
    return False


def _ends_one(method: Function, table: str, ends: Set[str]) -> bool:
    """It takes one out of the table, or goes over all, and calls an end of something."""
    spoken = any(own_attribute(node, method.owner or "") == table for node in method.of_kind(ast.Attribute))
    return spoken and any(last_name(call) in ends and not call.args for call in method.calls)


def _asks_for(method: Function, telling: Set[str]) -> bool:
    """Whether those have ended, or whether there is anything to be ended."""
    return any(
        isinstance(node, ast.Attribute) and (node.attr in telling or OVER.search(node.attr))
        for node in method.nodes
    )

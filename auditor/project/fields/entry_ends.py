"""Two ends of the entries of one table, of which one forgets a lease that the other gives back: `resume(key)`
gives back `job.room` and refunds `job.cost`, `drop(key)` takes the job out and only refunds; `reset()` goes
over all jobs, refunds each, and clears the table."""

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from auditor.project.code.bindings import assignments, own_attribute, suites_of
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


@dataclass(frozen=True, slots=True)
class Ends:
    """Names of what gives back to the lease's pool, and to any of the tree's."""

    its: Set[str]
    of_any: Set[str]

    def may_be(self, call: ast.Call) -> bool:
        return looks_releasing(call) or last_name(call) in self.of_any

    def are_called_by(self, function: Function) -> bool:
        return any(map(self.may_be, function.calls))


def forgotten_by(
    method: Function, family: Sequence[Function], table: str, field: str, ends: Ends
) -> Iterator[ast.stmt]:
    """Where the method takes an entry out of the table and gives back some of what another one of the family
    gives back there, but not this field."""
    for entry in (*_taken_out(method, table), *_swept(method, table)):
        rest = dict(_given_back(entry))
        if not any(map(ends.may_be, rest.values())) or not _has_no_other(entry, field):
            continue
        statement = entry.statement
        for other in family:
            for its in _taken_out(other, table) if other is not method else ():
                whole = dict(_given_back(its)) | dict(_given_back_by_helpers(its))
                if rest.keys() <= whole.keys() and any((end, field) in whole for end in ends.its):
                    yield statement
                    return


@dataclass(frozen=True, slots=True)
class Entry:
    """What a method takes out of a table, by the name that it has in these nodes, and the statement that does
    so."""

    method: Function
    name: str
    statement: ast.stmt
    nodes: Sequence[ast.AST]

    @property
    def calls(self) -> Iterator[ast.Call]:
        return (node for node in self.nodes if isinstance(node, ast.Call))


def _taken_out(method: Function, table: str) -> Iterator[Entry]:
    """`job` of `job = self.jobs.pop(key)`, or of a loop over what lies there which removes each that it goes
    over, `del self.jobs[job.key]`, with the statement that does so."""
    own = method.owner or ""
    for node in method.statements:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_pop(value, own, table):
                if _is_bound_once(method, name):
                    yield Entry(method, name, node, method.nodes)
            case ast.For(target=target, iter=over) if _comes_from(method, over, table):
                names = [each.id for each in walk(target) if isinstance(each, ast.Name)]
                removed = [each for each in node.body if _removes(each, own, table, names)]
                if removed and _is_bound_once(method, names[-1]):
                    yield Entry(method, names[-1], removed[0], method.nodes)


def _swept(method: Function, table: str) -> Iterator[Entry]:
    """`for job in self.jobs.values(): ...`, and `self.jobs.clear()` right behind; unless a helper sees to all
    that lies there before."""
    own = method.owner or ""
    suites = (suite for suite in suites_of(method.node) if not _asks_for_all(method, table))
    for suite in suites:
        for loop, after in pairwise(suite):
            match loop, after:
                case (
                    ast.For(target=ast.Name(id=name), iter=over, orelse=[]),
                    ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr="clear"), args=[])),
                ) if own_attribute(whole, own) == table and _comes_from(method, over, table):
                    yield Entry(method, name, after, [n for each in loop.body for n in walk(each)])


def _asks_for_all(method: Function, table: str) -> bool:
    """`self._release_rooms()`, which goes over the table itself."""
    methods = method.cls.methods if method.cls is not None else {}
    asked = [methods.get(own_attribute(call.func, method.owner or "") or "") for call in method.calls]
    return any(each is not None and f".{table}" in each.text for each in asked)


def _is_pop(value: ast.AST, own: str, table: str) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(value=whole, attr="pop"), args=[_, *_]):
            return own_attribute(whole, own) == table
    return False


def _removes(node: ast.stmt, own: str, table: str, names: Sequence[str]) -> bool:
    match node:
        case ast.Delete(targets=[ast.Subscript(value=whole, slice=key)]) if (
            own_attribute(whole, own) == table
        ):
            pass
        case ast.Expr(value=ast.Call(args=[key, *_]) as call) if _is_pop(call, own, table):
            pass
        case _:
            return False
    return any(isinstance(each, ast.Name) and each.id in names for each in walk(key))


def _comes_from(method: Function, over: ast.expr, table: str) -> bool:
    """`self.jobs.values()`, or a list that was made of them; the pairs of `self.jobs.items()`."""
    values = [over]
    if isinstance(over, ast.Name):
        values = [value for target, value in assignments(method) if getattr(target, "id", "") == over.id]
        counted = {id(each) for call in method.calls if last_name(call) == "len" for each in call.args}
        named = (node for node in method.nodes if isinstance(node, ast.Name) and node.id == over.id)
        if any(n is not over and id(n) not in counted for n in named if isinstance(n.ctx, ast.Load)):
            return False  # `return old`: whoever gets them may end them
    return len(values) == 1 and any(
        isinstance(node, ast.Attribute)
        and node.attr in ("values", "items")
        and own_attribute(node.value, method.owner or "") == table
        for node in walk(values[0])
    )


def _is_bound_once(method: Function, name: str) -> bool:
    bound = [node for node in _named(method.nodes, name) if isinstance(node.ctx, ast.Store)]
    return len(bound) == 1 and name not in method.parameters


def _named(nodes: Sequence[ast.AST], name: str) -> list[ast.Name]:
    """Not where a comprehension calls its own so."""
    inner = {
        id(node)
        for each in nodes
        if isinstance(each, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp)
        if any(getattr(generator.target, "id", "") == name for generator in each.generators)
        for node in walk(each)
    }
    named = (node for node in nodes if isinstance(node, ast.Name) and node.id == name)
    return [node for node in named if id(node) not in inner]


def _given_back(entry: Entry) -> Iterator[tuple[tuple[str, str], ast.Call]]:
    """`("refund", "cost")` of `self.quota.refund(job.cost)`."""
    for call in entry.calls:
        for given in call.args:
            match given:
                case ast.Attribute(value=ast.Name(id=of), attr=field) if of == entry.name:
                    yield (last_name(call), field), call


def _given_back_by_helpers(entry: Entry) -> Iterator[tuple[tuple[str, str], ast.Call]]:
    """What `self._end(job)` gives back of what it is told."""
    method = entry.method
    methods = method.cls.methods if method.cls is not None else {}
    for call in entry.calls:
        asked = methods.get(own_attribute(call.func, method.owner or "") or "")
        told = [getattr(each, "id", "") for each in call.args]
        if asked is not None and entry.name in told and not asked.is_static:
            names = asked.parameters[1:]
            at = told.index(entry.name)
            if at < len(names):
                yield from _given_back(Entry(asked, names[at], entry.statement, asked.nodes))


def _has_no_other(entry: Entry, field: str) -> bool:
    """All that it does with the entry is to ask whether there is one, and to read other fields; the field
    is spoken of nowhere."""
    nodes = entry.nodes
    read = {
        id(node.value) for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    called = {id(call.func.value) for call in entry.calls if isinstance(call.func, ast.Attribute)}
    tests = (node.test for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.While))
    asked = {id(part) for test in tests for part in _asked(test)}
    spoken = any(_says(node) == field for node in entry.method.nodes)
    return not spoken and all(
        id(node) in (read - called) | asked
        for node in _named(nodes, entry.name)
        if isinstance(node.ctx, ast.Load)
    )


def _says(node: ast.AST) -> object:
    """A field, a name or a text."""
    return getattr(node, "attr", getattr(node, "id", getattr(node, "value", "")))


def _asked(test: ast.expr) -> Iterator[ast.expr]:
    """`job`, `not job`, `job is None`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield from _asked(inner)
        case ast.BoolOp(values=values):
            for each in values:
                yield from _asked(each)
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()]):
            yield left
        case _:
            yield test

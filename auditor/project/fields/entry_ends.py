"""Two ends of the entries of one table, of which one forgets a lease that the other gives back: `resume(key)`
gives back `job.room` and refunds `job.cost`, `drop(key)` takes the job out and only refunds."""

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from auditor.project.code.bindings import assignments, own_attribute
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
    for name, statement in _taken_out(method, table):
        rest = dict(_given_back(method, name))
        if not any(map(ends.may_be, rest.values())) or not _has_no_other(method, name, field):
            continue
        for other in family:
            for its, _ in _taken_out(other, table) if other is not method else ():
                whole = dict(_given_back(other, its))
                if rest.keys() <= whole.keys() and any((end, field) in whole for end in ends.its):
                    yield statement
                    return


def _taken_out(method: Function, table: str) -> Iterator[tuple[str, ast.stmt]]:
    """`job` of `job = self.jobs.pop(key)`, or of a loop over what lies there which removes each that it goes
    over, `del self.jobs[job.key]`, with the statement that does so."""
    own = method.owner or ""
    for node in method.statements:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_pop(value, own, table):
                if _is_bound_once(method, name):
                    yield name, node
            case ast.For(target=target, iter=over) if _comes_from(method, over, table):
                names = [each.id for each in walk(target) if isinstance(each, ast.Name)]
                removed = [each for each in node.body if _removes(each, own, table, names)]
                if removed and _is_bound_once(method, names[-1]):
                    yield names[-1], removed[0]


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
    bound = [node for node in _named(method, name) if isinstance(node.ctx, ast.Store)]
    return len(bound) == 1 and name not in method.parameters


def _named(method: Function, name: str) -> list[ast.Name]:
    """Not where a comprehension calls its own so."""
    inner = {
        id(node)
        for each in method.nodes
        if isinstance(each, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp)
        if any(getattr(generator.target, "id", "") == name for generator in each.generators)
        for node in walk(each)
    }
    named = (node for node in method.nodes if isinstance(node, ast.Name) and node.id == name)
    return [node for node in named if id(node) not in inner]


def _given_back(method: Function, name: str) -> Iterator[tuple[tuple[str, str], ast.Call]]:
    """`("refund", "cost")` of `self.quota.refund(job.cost)`."""
    for call in method.calls:
        for given in call.args:
            match given:
                case ast.Attribute(value=ast.Name(id=of), attr=field) if of == name:
                    yield (last_name(call), field), call


def _has_no_other(method: Function, name: str, field: str) -> bool:
    """All that it does with the entry is to ask whether there is one, and to read other fields; the field
    is spoken of nowhere."""
    read = {
        id(node.value)
        for node in method.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    called = {id(call.func.value) for call in method.calls if isinstance(call.func, ast.Attribute)}
    tests = (node.test for node in method.nodes if isinstance(node, ast.If | ast.IfExp | ast.While))
    asked = {id(part) for test in tests for part in _asked(test)}
    spoken = any(_says(node) == field for node in method.nodes)
    return not spoken and all(
        id(node) in (read - called) | asked for node in _named(method, name) if isinstance(node.ctx, ast.Load)
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

"""Methods whose bodies say that they are two halves of one key's life, whatever they are called.

Wrappers that keep what they take of another pool under what they are told: `self.rows[seq] =
self.pages.several(n)` of `create(seq, n)`, and `self.pages.put_all(self.rows.pop(seq))` of `release(seq)`. A
registry only strikes off; here the end hands on what it strikes off to whom the beginning asked. And tables
of counts."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import RELEASE_WORDS, take_apart


def kept_for(begins: Function, ends: Sequence[Function]) -> str | None:
    """The parameter under which the first keeps what the ends hand on, all of them."""
    told, asked = own_parameters(begins), {whom for whom, _ in _of_fields(begins)}
    for table, key in _entered(begins):
        if key in told and ends and all(_hands_on(each, table, key, asked) for each in ends):
            return key
    return None


def counted_for(begins: Function, ends: Sequence[Function]) -> bool:
    """`self.taken[expert] += 1` of `sit(expert)`, and `self.taken[expert] -= 1` of `stand(expert)`."""
    begun = set(_balances(begins))
    back = [{(table, -way, key) for table, way, key in _balances(each)} for each in ends]
    return bool(begun and back) and all(begun & each for each in back)


def _balances(method: Function) -> Iterator[tuple[str, int, str]]:
    """Tables in which it counts under what it is told."""
    told = own_parameters(method)
    for table, way, key, _ in field_work(method).balances:
        if isinstance(key, ast.Name) and key.id in told:
            yield table, way, key.id


def _entered(begins: Function) -> Iterator[tuple[str, str]]:
    """Tables with names of keys, where what is put in is none of what the method is told."""
    work = field_work(begins)
    for put in work.put:
        if isinstance(put.key, ast.Name) and not (
            isinstance(put.value, ast.Name) and put.value.id in work.told
        ):
            yield put.field, put.key.id


def _hands_on(ends: Function, table: str, key: str, asked: Set[str]) -> bool:
    """It takes the entry out by the parameter of that name, and gives it to one of those who were asked."""
    if key not in own_parameters(ends):
        return False
    work = field_work(ends)
    out = {
        id(node)
        for name, node in work.taken
        if name == table and isinstance(node, ast.Call) and node.args
        if mentions(node.args[0], {key}, frozenset())
    }
    names = work.derived(frozenset(), out) - work.told if out else frozenset()
    return bool(out) and any(
        whom in asked
        and take_apart(last_part(call.func), RELEASE_WORDS) is not None
        and any(mentions(each, names, out) for each in call.args)
        for whom, call in _of_fields(ends)
    )


def _of_fields(method: Function) -> Iterator[tuple[str, ast.Call]]:
    """Calls of methods of what lies in its fields: `self.pages.put_all(pages)`."""
    for call in method.calls:
        match call.func:
            case ast.Attribute(value=ast.Attribute() as whom) if (
                field := own_attribute(whom, method.owner or "")
            ) is not None:
                yield field, call

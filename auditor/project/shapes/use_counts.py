"""Counts told by their shape: `begin_request` raises a number that `end_request` lowers."""

import ast
from collections.abc import Iterable, Iterator, Set
from typing import TypeGuard

from auditor.project.code.bindings import given_to, given_to_field, own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.shapes.field_work import FieldWork, field_work
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import undoes
from auditor.source.nodes import walk

STRIKING = ("del ", "del(", "-=", "pop", "remove", "discard", "difference_update")
"""What a text has that strikes something off a table, as `field_work` reads it."""


def use_counts(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """Methods of one class, called like halves of a pair, the one counting up what the other counts down; or
    down, what it asks for, and up again."""
    named = [method for method in methods if not method.name.startswith("__")]
    opposites = [(begins, ends) for begins in named for ends in named if undoes(ends.name, begins.name)]
    for begins, ends in opposites:
        if _is_turned_round(begins, ends):
            continue
        used = counted(begins, ast.Add) & counted(ends, ast.Sub)
        left = {
            name
            for name in counted(begins, ast.Sub) & counted(ends, ast.Add)
            if asks(field_work(begins), name) or _is_semaphore(begins, name) or _is_least(begins, name)
        }
        if used or left:
            yield begins, ends


def _is_turned_round(begins: Function, ends: Function) -> bool:
    """`unhook()` hands out what `hook(node)` is told."""
    told = own_parameters(begins) and not own_parameters(ends)
    return bool(told) and any(isinstance(each, ast.Name) for each in field_work(ends).returned)


def permits(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`enter(name)` counts down what is left and notes the name, `leave(name)` strikes it off and counts up,
    or keeps what it draws under the name, until that is put back; or is refused where too many are noted.
    Whoever only counts what it notes asks no number first."""
    text = methods[0].cls.text if methods and methods[0].cls is not None else ""
    if not any(map(text.__contains__, STRIKING)):
        return
    works = [field_work(method) for method in methods if not method.name.startswith("__")]
    for begins in works:
        noted = noted_under(begins.method, own_parameters(begins.method)[:1])
        for ends in works if noted else ():
            struck = noted & struck_off(ends.method) if ends is not begins else set()
            down = {name for name, way in begins.counted if way < 0 and (name, 1) in ends.counted}
            called = undoes(ends.method.name, begins.method.name)
            drawn = {name for name, _ in begins.taken} & {put.field for put in ends.put} if called else set()
            if struck and (
                any(asks(begins, name) for name in down | drawn) or (called and _has_room(begins, struck))
            ):
                yield begins.method, ends.method


def waits_for(method: Function, counts: Set[str]) -> bool:
    """`while self.left == 0: wait()`, or `return False`, before `self.left -= 1`: such a `down` takes, and
    `up` gives back; a count of users is asked only when it has been lowered."""
    lowered = [
        node.lineno
        for node in method.nodes
        if isinstance(node, ast.AugAssign) and _own(method, node.target) in counts
    ]
    return any(
        _own(method, each) in counts
        for node in method.nodes
        if isinstance(node, ast.While | ast.Call) or _answers_no(node)
        if node.lineno < min(lowered, default=0)
        for each in walk(_condition(node) or ast.Pass())
        if isinstance(each, ast.expr)
    )


def _answers_no(node: ast.AST) -> TypeGuard[ast.If]:
    last = node.body[-1] if isinstance(node, ast.If) else None
    return isinstance(last, ast.Return) and last.value is not None


def capacities(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`spend(tokens)` lowers what is left where there is enough and refuses otherwise, `earn(tokens)` raises
    it by as much as it is told; or raises what is used up to a limit. No name says so."""
    text = methods[0].cls.text if methods and methods[0].cls is not None else ""
    if "+=" not in text or "-=" not in text:
        return
    works = [field_work(method) for method in methods if not method.name.startswith("__")]
    for begins in works:
        wanted = {(name, way) for name, way, value in begins.amounts if _is_amount(begins, value)}
        wanted = {(name, way) for name, way in wanted if _refuses(begins, name)}
        for ends in works if wanted else ():
            back = {(name, -way) for name, way, value in ends.amounts if _is_amount(ends, value)}
            if ends is not begins and wanted & back and not any(_refuses(ends, name) for name, _ in wanted):
                yield begins.method, ends.method


def _is_amount(work: FieldWork, value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in own_parameters(work.method)[:1]


def _refuses(work: FieldWork, field: str) -> bool:
    """`if tokens > self.left: return False`, or it raises, or waits."""
    told = set(own_parameters(work.method)[:1])
    for test in _conditions(work.method):
        compared = (each for each in walk(test) if isinstance(each, ast.Compare))
        if any(mentions(each, told, frozenset()) and _mentions_field(each, field) for each in compared):
            return True
    return False


def _mentions_field(node: ast.AST, field: str) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == field for each in walk(node))


def asks(work: FieldWork, field: str) -> bool:
    own = None if work.method.cls is not None else field
    return any(
        (isinstance(each, ast.Attribute) and each.attr == field)
        or (isinstance(each, ast.Name) and each.id == own)
        for test in _conditions(work.method)
        for each in walk(test)
    )


def _is_least(method: Function, field: str) -> bool:
    """`granted = min(n, self.left)`: no more than there is."""
    return any(
        last_part(call.func) == "min" and any(_own(method, each) == field for each in call.args)
        for call in method.calls
    )


def _conditions(method: Function) -> Iterator[ast.expr]:
    for kind in (ast.If, ast.While, ast.Assert, ast.Call):
        for node in method.of_kind(kind):
            if (test := _condition(node)) is not None:
                yield test


def _condition(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.Assert(test=test):
            return test
        case ast.Call(func=ast.Attribute(attr="wait_for"), args=[ast.Lambda(body=test), *_]):
            return test
    return None


def _has_room(work: FieldWork, tables: Set[str]) -> bool:
    """`if len(self.active) >= self.limit: return False`, or it raises: nobody else is put out instead."""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.body[-1], ast.Return | ast.Raise)
        and any(
            isinstance(test, ast.Compare)
            and isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq)
            and any(
                isinstance(each, ast.Attribute)
                and (each.attr in tables or _shows(work.method, each.attr, tables))
                for each in walk(test)
            )
            for test in walk(node.test)
        )
        for node in work.method.statements
    )


def _shows(method: Function, name: str, tables: Set[str]) -> bool:
    """`self.spoken_for`, a property that goes over the table."""
    shown = method.cls.methods.get(name) if method.cls is not None else None
    return shown is not None and any(f".{table}" in shown.text for table in tables)


def noted_under(method: Function, told: Iterable[str]) -> set[str]:
    """Tables in which it notes something under one of these."""
    work, told = field_work(method), {*told}
    under = {put.field for put in work.put if put.key is not None and mentions(put.key, told, frozenset())}
    under |= {field for field, key in work.added_under if mentions(key, told, frozenset())}
    return under | {each.field for each in work.marked if each.on and mentions(each.place, told, frozenset())}


def struck_off(method: Function) -> set[str]:
    """Tables out of which it takes what is there under the first thing that it is told."""
    told = set(own_parameters(method)[:1])
    return {field for field, key in field_work(method).removed if mentions(key, told, frozenset())}


def struck_off_by_its_answer(begins: Function, ends: Function) -> bool:
    """`self.sessions[number] = user; return number`, and `finish(number)`, or `finish(user, number)`, strikes
    that off."""
    work, told = field_work(begins), own_parameters(begins)
    returned = (each for each in work.returned if isinstance(each, ast.Name | ast.Attribute))
    answers = {ast.unparse(each) for each in returned} - {*told}
    kept = {put.field for put in work.put if put.key is not None and ast.unparse(put.key) in answers}
    only = {*own_parameters(ends)} - {*told} if kept else set()
    also = {field for field, key in field_work(ends).removed if mentions(key, only, frozenset())}
    return not kept.isdisjoint(struck_off(ends) | also)


def lowered_by(method: Function, partners: list[Function]) -> set[str]:
    """What is left of something, in a field: `get_credit()` lowers the number that `put_credit()` raises."""
    lowered = counted(method, ast.Sub)
    return {name for partner in partners if lowered for name in lowered & counted(partner, ast.Add)}


def returns_the_count(method: Function, counts: Set[str]) -> bool:
    """`self.left -= 1; return self.left` hands out nothing."""
    own, returned = method.owner or "", field_work(method).returned
    return bool(returned) and all(
        isinstance(value, ast.Constant) or own_attribute(value, own) in counts for value in returned
    )


def counted(method: Function, way: type[ast.operator]) -> set[str]:
    """Fields of its own object, or what they hold under a key, or numbers of the module, that it changes one
    way only."""
    work = field_work(method)
    if work.ways_changed is None:
        work.ways_changed = _ways_changed(method)
    return {attribute for attribute, ways in work.ways_changed.items() if ways == {way}}


def _ways_changed(method: Function) -> dict[str, set[type[ast.operator]]]:
    ways_of: dict[str, set[type[ast.operator]]] = {}
    for target, op in (*changed(method), *semaphores(method)):
        place = target.value if isinstance(target, ast.Subscript) else target
        attribute = _own(method, place)
        if attribute is not None:
            ways_of.setdefault(attribute, set()).add(type(op))
    return ways_of


def _own(method: Function, place: ast.expr) -> str | None:
    """`left` of `self.left`, and of a function that says `global left`."""
    if method.owner is not None:
        return own_attribute(place, method.owner)
    return place.id if isinstance(place, ast.Name) and place.id in method.module.assigned else None


def changed(method: Function) -> Iterator[tuple[ast.expr, ast.operator]]:
    """`self.used[name] += 1`, `n = self.used.get(name, 0)` with `self.used[name] = n + 1`, or `n =
    self.used[name] - 1` with `self.used[name] = n`, `self.left = min(self.limit, self.left + n)`."""
    for node in method.of_kind(ast.AugAssign):
        yield node.target, node.op
    for assigned in method.of_kind(ast.Assign):
        match assigned:
            case ast.Assign(
                targets=[ast.Subscript(value=place) | (ast.Attribute() as place) as target], value=value
            ):
                for left, op in _sums(_reckoned(method, value)):
                    before = given_to(method, left.id) if isinstance(left, ast.Name) else iter((left,))
                    if any(ast.unparse(place) in ast.unparse(each) for each in before):
                        yield target, op


def semaphores(method: Function) -> Iterator[tuple[ast.expr, ast.operator]]:
    """`self.slots.acquire()` of a semaphore is one less, `self.slots.release()` one more."""
    for call in method.calls:
        match call.func:
            case ast.Attribute(value=ast.Attribute() as field, attr="acquire" | "release" as way) if (
                _is_semaphore(method, field.attr)
            ):
                yield field, ast.Sub() if way == "acquire" else ast.Add()


def _is_semaphore(method: Function, field: str) -> bool:
    methods = method.cls.methods.values() if method.cls is not None else ()
    return any(
        isinstance(value, ast.Call) and last_part(value.func).endswith("Semaphore")
        for each in methods
        for value in given_to_field(each, field)
    )


def _reckoned(method: Function, value: ast.expr) -> ast.expr:
    """The sum that a name was given, if that is all that it ever was."""
    given = list(given_to(method, value.id)) if isinstance(value, ast.Name) else []
    return given[0] if len(given) == 1 and isinstance(given[0], ast.BinOp) else value


def _sums(value: ast.expr) -> Iterator[tuple[ast.expr, ast.operator]]:
    match value:
        case ast.BinOp(left=left, op=op):
            yield left, op
        case ast.Call(func=ast.Name(id="min" | "max"), args=args):
            yield from ((each.left, each.op) for each in args if isinstance(each, ast.BinOp))

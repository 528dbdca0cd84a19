"""Counts told by their shape: `begin_request` raises a number that `end_request` lowers."""

import ast
from collections.abc import Iterable, Iterator, Set

from auditor.project.code.bindings import given_to, given_to_field, own_attribute, own_name, statements_of
from auditor.project.code.modules import Function, last_part
from auditor.project.shapes.field_work import FieldWork, field_work, mentions
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import COUNTING, PAIRS, pairs_with, split, take_apart, undoes

REFERENCES = frozenset({"ref", "refs", "refcount", "refcnt", "references", "pins"})
"""Words in the names of counts of those who need an object."""

USERS = frozenset(
    {"uses", "users", "readers", "holders", "borrowers", "sharers", "rc", "count", "counts", "cnt"}
)
"""The same of others, where the last to go is asked for: uses alone may be statistics."""

COUNTED_DOWN = frozenset().union(*(others for verbs, others in PAIRS if verbs & COUNTING))


def use_counts(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """Methods of one class, called like halves of a pair, the one counting up what the other counts down; or
    down, what it asks for, and up again."""
    named = [method for method in methods if not method.name.startswith("__")]
    up = {method: _counted(method, ast.Add) for method in named}
    down = {method: _counted(method, ast.Sub) for method in named}
    for begins in named:
        for ends in named:
            used = up[begins] & down[ends]
            left = {
                name
                for name in down[begins] & up[ends]
                if _asks(field_work(begins), name) or _is_semaphore(begins, name)
            }
            if (used or left) and undoes(ends.name, begins.name):
                yield begins, ends


def reference_counts(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`retain(page)` raises the `page.refs` that `drop(page)` lowers: the count is the object's own; or
    `self.refs[page]`, of each of those that it is told."""
    cls = methods[0].cls if methods else None
    if cls is not None and not any(word in cls.text for word in ("ref", "pin", *USERS)):
        return
    raised = {id(method): _counted_of_told(method, ast.Add) for method in methods}
    lowered = {id(method): _counted_of_told(method, ast.Sub) for method in methods}
    for begins in methods:
        for ends in methods:
            both = {name for name in raised[id(begins)] & lowered[id(ends)] if _of_users(ends, name)}
            if both and not (raised[id(ends)] or lowered[id(begins)]):
                yield begins, ends


def counts_what_it_returns(function: Function, partners: list[Function]) -> bool:
    """`worker.load += 1; return worker`, where a partner lowers the load of the one that it is told."""
    lowered = {
        count
        for partner in partners
        for name, count in _counts_of_names(partner, ast.Sub)
        if name in own_parameters(partner)
    }
    returned = {
        node.value.id
        for node in statements_of(function.node)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    told = own_parameters(function)
    return any(
        name in returned and name not in told and count in lowered
        for name, count in _counts_of_names(function, ast.Add)
    )


def _counts_of_names(function: Function, way: type[ast.operator]) -> Iterator[tuple[str, str]]:
    """`worker` and `load` of `worker.load += 1`."""
    own = own_name(function)
    for node in statements_of(function.node):
        match node:
            case ast.AugAssign(target=ast.Attribute(value=ast.Name(id=name), attr=count), op=op):
                if isinstance(op, way) and name != own:
                    yield name, count


def permits(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`enter(name)` counts down what is left and notes the name, `leave(name)` strikes it off and counts up;
    or is refused where too many are noted. Whoever only counts what it notes asks no number first."""
    works = [field_work(method) for method in methods if not method.name.startswith("__")]
    for begins in works:
        noted = noted_under(begins.method, own_parameters(begins.method)[:1])
        for ends in works if noted else ():
            struck = noted & struck_off(ends.method) if ends is not begins else set()
            down = {name for name, way in begins.counted if way < 0 and (name, 1) in ends.counted}
            called = undoes(ends.method.name, begins.method.name)
            if struck and (
                any(_asks(begins, name) for name in down) or (called and _has_room(begins, struck))
            ):
                yield begins.method, ends.method


def _asks(work: FieldWork, field: str) -> bool:
    return any(
        isinstance(each, ast.Attribute) and each.attr == field
        for node in ast.walk(work.method.node)
        if isinstance(node, ast.If | ast.While | ast.Assert)
        for each in ast.walk(node.test)
    )


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
                for each in ast.walk(test)
            )
            for test in ast.walk(node.test)
        )
        for node in statements_of(work.method.node)
    )


def _shows(method: Function, name: str, tables: Set[str]) -> bool:
    """`self.spoken_for`, a property that goes over the table."""
    shown = method.cls.methods.get(name) if method.cls is not None else None
    return shown is not None and any(f".{table}" in shown.text for table in tables)


def noted_under(method: Function, told: Iterable[str]) -> set[str]:
    """Tables in which it notes something under one of these."""
    work, told = field_work(method), {*told}
    under = {put.field for put in work.put if put.key is not None and mentions(put.key, told, frozenset())}
    return under | {each.field for each in work.marked if each.on and mentions(each.place, told, frozenset())}


def struck_off(method: Function) -> set[str]:
    """Tables out of which it takes what is there under the first thing that it is told."""
    told = set(own_parameters(method)[:1])
    return {field for field, key in field_work(method).removed if mentions(key, told, frozenset())}


def _counted_of_told(method: Function, way: type[ast.operator]) -> set[str]:
    """Numbers of references, by their names, of the first thing that it is told."""
    told = own_parameters(method)[:1]
    changed = [
        node.target
        for node in statements_of(method.node)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, way)
    ]
    of_object = {
        target.attr
        for target in changed
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id in told
    }
    in_table = {own for target in changed if (own := _table_of_told(method, target)) is not None}
    return {name for name in of_object | in_table if not (REFERENCES | USERS).isdisjoint(split(name))}


def _of_users(ends: Function, name: str) -> bool:
    """`if page.uses == 0:`, `if not page.users:`"""
    return not REFERENCES.isdisjoint(split(name)) or _asks(field_work(ends), name)


def _table_of_told(method: Function, target: ast.expr) -> str | None:
    """`refs` of `self.refs[page]`, where it is told the page, or pages."""
    own = own_name(method)
    if own is None or not isinstance(target, ast.Subscript):
        return None
    told = field_work(method).derived(set(own_parameters(method)[:1]), frozenset())
    of_told = mentions(target.slice, told, frozenset())
    return own_attribute(target.value, own) if of_told else None


def returns_what_it_is_told(method: Function) -> bool:
    """`return [*pages]`: the references are those of what is returned; not `return page.data`."""
    work = field_work(method)
    told = work.derived(set(own_parameters(method)[:1]), frozenset())
    answers = [value for value in work.returned if not isinstance(value, ast.Constant)]
    return bool(answers) and all(_is_told(value, told) for value in answers)


def _is_told(value: ast.expr, told: Set[str]) -> bool:
    """Not what lies under it: `self.loaded[name]`."""
    keys = {
        id(name)
        for node in ast.walk(value)
        if isinstance(node, ast.Subscript)
        for name in ast.walk(node.slice)
    }
    calls = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
    fields = [node for node in ast.walk(value) if isinstance(node, ast.Attribute) and id(node) not in calls]
    parts = {id(node.value) for node in fields}
    named = (node for node in ast.walk(value) if isinstance(node, ast.Name) and node.id in told)
    return any(id(node) not in parts | keys for node in named)


def counts_through(method: Function, partners: list[Function]) -> bool:
    """`lock_path(node)` calls `node.lock()`, `node.parent.lock()`, and a partner calls `unlock` of what it is
    told."""
    up = [name for call in _of_told(method) if (name := take_apart(call, COUNTING)) is not None]
    down = [
        name
        for partner in partners
        for call in _of_told(partner)
        if (name := take_apart(call, COUNTED_DOWN)) is not None
    ]
    return any(pairs_with(one, other) for one in up for other in down)


def _of_told(method: Function) -> Iterator[str]:
    """Methods that it calls of the first thing it is told, or of what that leads to."""
    told = field_work(method).derived(set(own_parameters(method)[:1]), frozenset())
    for call in method.calls:
        match call.func:
            case ast.Attribute(value=owner, attr=attr) if mentions(owner, told, frozenset()):
                yield attr


def lowered_by(method: Function, partners: list[Function]) -> set[str]:
    """What is left of something, in a field: `get_credit()` lowers the number that `put_credit()` raises."""
    lowered = _counted(method, ast.Sub)
    return {name for partner in partners if lowered for name in lowered & _counted(partner, ast.Add)}


def returns_the_count(method: Function, counts: Set[str]) -> bool:
    """`self.left -= 1; return self.left` hands out nothing."""
    own, returned = own_name(method) or "", field_work(method).returned
    return bool(returned) and all(
        isinstance(value, ast.Constant) or own_attribute(value, own) in counts for value in returned
    )


def _counted(method: Function, way: type[ast.operator]) -> set[str]:
    """Fields of its own object, or what they hold under a key, that it changes one way only."""
    own = own_name(method)
    changed: dict[str, set[type[ast.operator]]] = {}
    for target, op in (*_changed(method), *_semaphores(method)) if own is not None else ():
        place = target.value if isinstance(target, ast.Subscript) else target
        attribute = own_attribute(place, own or "")
        if attribute is not None:
            changed.setdefault(attribute, set()).add(type(op))
    return {attribute for attribute, ways in changed.items() if ways == {way}}


def _changed(method: Function) -> Iterator[tuple[ast.expr, ast.operator]]:
    """`self.used[name] += 1`, `n = self.used.get(name, 0)` with `self.used[name] = n + 1`, `self.left =
    min(self.limit, self.left + n)`."""
    for node in ast.walk(method.node):
        match node:
            case ast.AugAssign(target=target, op=op):
                yield target, op
            case ast.Assign(
                targets=[ast.Subscript(value=place) | (ast.Attribute() as place) as target], value=value
            ):
                for left, op in _sums(value):
                    before = given_to(method, left.id) if isinstance(left, ast.Name) else iter((left,))
                    if any(ast.unparse(place) in ast.unparse(each) for each in before):
                        yield target, op


def _semaphores(method: Function) -> Iterator[tuple[ast.expr, ast.operator]]:
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


def _sums(value: ast.expr) -> Iterator[tuple[ast.expr, ast.operator]]:
    match value:
        case ast.BinOp(left=left, op=op):
            yield left, op
        case ast.Call(func=ast.Name(id="min" | "max"), args=args):
            yield from ((each.left, each.op) for each in args if isinstance(each, ast.BinOp))

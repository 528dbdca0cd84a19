"""Statements that fill a field, or a place in a table, which an earlier call may have filled, and whether
anything before them looks at what is there."""

import ast
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from auditor.ir.calls import LOGGING
from auditor.project.code.bindings import assigned_by, assignments, given_to, own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.fields.merged_into import merged_into
from auditor.project.fields.told_another_key import is_told_another_key
from auditor.source.nodes import walk

ONCE = re.compile(r"cache|once|property|lazy|contextmanager|setter|fixture|register|hook")
"""Decorators under which a method is not what its callers call, or is called once."""


WORKING = re.compile(r"flush|wait(?:_\w+)?|sync(?:hroni[sz]e)?|write\w*|record|touch")
"""Methods of a thing that leave it as it is."""

MAKING_ROOM = re.compile(r"evict|reclaim|make_(?:room|space)")
"""Methods that put out whatever is least needed."""

LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Filling:
    """`self.field = ...`, `self.field[key] = ...`, or `owner.field = ...` of another object."""

    method: Function
    owner: str
    field: str
    statement: ast.stmt
    target: ast.expr
    key: ast.expr | None = None

    @property
    def line(self) -> int:
        return self.statement.lineno


def fillings(method: Function, owner: str, field: str) -> list[Filling]:
    """Every statement of the method that does so, with something that is not None."""
    found = []
    for node in method.statements:
        for place, _ in merged_into(method, node):
            if own_attribute(place.value, owner) == field:
                found.append(Filling(method, owner, field, node, place, made_of(method, place.slice)))
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or is_none(node.value):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if own_attribute(each, owner) == field:
                    found.append(Filling(method, owner, field, node, each))
                elif isinstance(each, ast.Subscript) and own_attribute(each.value, owner) == field:
                    found.append(Filling(method, owner, field, node, each, made_of(method, each.slice)))
    return found


def made_of(method: Function, key: ast.expr) -> ast.expr:
    """What a local name of the key was made of: `key = (layer, head)`."""
    if isinstance(key, ast.Name) and key.id not in method.parameters:
        bound = [n for n in method.nodes if isinstance(n, ast.Name) and n.id == key.id]
        made = list(given_to(method, key.id))
        if len(made) == 1 and sum(isinstance(n.ctx, ast.Store) for n in bound) == 1:
            return made[0]
    return key


def may_be_called_again(method: Function) -> bool:
    """Others call it, by its name, and whenever they want to."""
    return method.is_method and not (
        method.name.startswith("_")
        or method.is_context_manager
        or any(ONCE.search(decorator) for decorator in method.decorators)
    )


def looks_first(filling: Filling, family: Sequence[Function]) -> bool:
    """Up to the store the method speaks of the field, by itself or in a method that it calls, gives its
    object away, or asks for a state that somebody sets."""
    aside = [*only_says(filling), *(each for ask in leaving(filling) for each in ask.body)]
    said = {id(node) for each in aside for node in walk(each)} | _labels(filling)
    nodes = [node for node in before(filling) if id(node) not in said]
    own = filling.method.owner
    others = _other_entries(filling)
    about = [node for node in nodes if id(node) not in others]
    if own is None or _any_speaks_of(about, filling.field, {own, filling.owner}):
        return True
    found = found_in_a_table(filling.method, filling.owner)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    aside_from = _making_room(filling, family)
    for call in calls:
        if any(getattr(argument, "id", None) == own for argument in call.args):
            return True
        if call is found:  # what the search does to others, such as the oldest one, it does not do to this
            named = getattr(call.func, "attr", "")
            if any(m.name == named and filling.field in map(_attr, attributes_in(m.node)) for m in family):
                return True
        elif calls_who_speaks(call, own, filling.field, family, aside_from) and not told_another(
            call, filling, family
        ):
            return True
    needed = _needed_for_it(filling)
    asked = [
        node
        for test in tests_in(nodes)
        if _decides(test, filling) and ast.unparse(asked_for(test)) not in needed
        for node in attributes_in(test)
    ]
    return any(_is_a_state(node, own, filling.method, family) for node in asked)


def _needed_for_it(filling: Filling) -> set[str]:
    """`self.current` of `self.reference = self.current.retain()`: whether there is one says what can be asked
    for another, and nothing of `self.reference`."""
    value = getattr(filling.statement, "value", None)
    return {ast.unparse(each) for each in attributes_in(value)} if value is not None else set()


def asked_for(test: ast.AST) -> ast.AST:
    """What is asked whether there is one: `self.current` of `self.current is not None`."""
    match test:
        case ast.Compare(left=asked, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return asked
        case ast.UnaryOp(op=ast.Not(), operand=asked):
            return asked
    return test


def _labels(filling: Filling) -> set[int]:
    """`"anchor"` of `self.anchor = pool.take("anchor")` tells the pool a name, and asks for no field."""
    match getattr(filling.statement, "value", None):
        case ast.Call(func=ast.Attribute(), args=args):
            return {id(each) for each in args if isinstance(each, ast.Constant)}
    return set()


def _making_room(filling: Filling, family: Sequence[Function]) -> frozenset[str]:
    """Methods that put out some entries, whichever, and leave this one on some of their ways."""
    if filling.key is None:
        return frozenset()
    making = {method.name for method in family if MAKING_ROOM.search(method.name)}
    told = {
        last_part(call.func)
        for call in filling.method.calls
        if any(same(made_of(filling.method, argument), filling.key) for argument in call.args)
    }
    return frozenset(making - told)


def _other_entries(filling: Filling) -> set[int]:
    """Where `self.streams[parent]` is read before `self.streams[child]` is filled."""
    if not isinstance(filling.key, ast.Name):
        return set()
    found = set()
    for node in filling.method.nodes:
        match node:
            case ast.Subscript(value=ast.Attribute() as table, slice=ast.Name() as key) if not same(
                key, filling.key
            ):
                found.add(id(table))
    return found


def told_another(call: ast.Call, filling: Filling, family: Sequence[Function]) -> bool:
    """It has to do with what stands under another key that the caller tells."""
    told = filling.method.parameters[1:]
    return filling.key is not None and is_told_another_key(call, filling.key, told, filling.field, family)


def _decides(test: ast.AST, filling: Filling) -> bool:
    """Whether the store depends on it: `if job.process is not None: job.process.wait()`, and on it goes, does
    not."""
    for node in filling.method.nodes:
        if isinstance(node, ast.If) and node.test is test:
            inside = [inner for each in (*node.body, *node.orelse) for inner in walk(each)]
            return any(inner is filling.statement or isinstance(inner, LEAVING) for inner in inside)
    return True


def only_says(filling: Filling) -> list[ast.If]:
    """`if self.buffer is not None: log.warning("still there")`, or `self.buffer.flush()`, and goes on."""
    return [
        node
        for node in filling.method.statements
        if isinstance(node, ast.If)
        and (node.end_lineno or node.lineno) < filling.line
        and not node.orelse
        and _asks_for(node.test, filling)
        and all(only_logs(each) or _works_with(each, filling) for each in node.body)
    ]


def leaving(filling: Filling) -> Iterator[ast.If]:
    """`if self.sizes.get(key) == size: return self.table[key]` above: whoever gets to the store has not been
    there."""
    for node in filling.method.statements:
        if not isinstance(node, ast.If) or (node.end_lineno or node.lineno) >= filling.line:
            continue
        if filling.key is not None and not node.orelse and isinstance(node.body[-1], ast.Return):
            yield node


def _asks_for(test: ast.expr, filling: Filling) -> bool:
    """Whether there is one already."""
    match test:
        case ast.Compare(left=key, ops=[ast.In()], comparators=[table]) if filling.key is not None:
            return own_attribute(table, filling.owner) == filling.field and same(
                made_of(filling.method, key), filling.key
            )
        case ast.Compare(left=asked, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return filling.key is None and own_attribute(asked, filling.owner) == filling.field
    return filling.key is None and own_attribute(test, filling.owner) == filling.field


def _works_with(statement: ast.stmt, filling: Filling) -> bool:
    """A call of its own, `self.files[path].flush()`, or one that has nothing to do with it; no end of it."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=of, attr=way), args=args)):
            its = ast.unparse(of) == ast.unparse(filling.target)
            own = {filling.owner, filling.method.owner}
            told = any(isinstance(n, ast.Name) and n.id in own for each in args for n in walk(each))
            elsewhere = not its and names_in(of).isdisjoint(own)
            return not told and (WORKING.fullmatch(way) is not None if its else elsewhere)
    return False


def only_logs(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=way))):
            return way in LOGGING
    return False


def same(one: ast.expr, other: ast.expr) -> bool:
    return ast.unparse(one) == ast.unparse(other)


def moved_on(filling: Filling) -> Iterator[Filling]:
    """`self.last = self.current`, before or while `self.current` is filled."""
    for node in filling.method.statements:
        for to, value in assigned_by(node) if node.lineno <= filling.line else ():
            field = own_attribute(to, filling.owner)
            if field is not None and own_attribute(value, filling.owner) == filling.field:
                yield Filling(filling.method, filling.owner, field, node, to)


def found_in_a_table(method: Function, name: str) -> ast.expr | None:
    """`session = self.sessions[key]`, `self.sessions.get(key)`, `self.find(key)`, and never another one."""
    own = method.owner or ""
    bound = [
        node
        for node in method.nodes
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
    ]
    looked_up = [value for value in given_to(method, name) if _looks_up(value, own, method)]
    return looked_up[0] if len(bound) == 1 and looked_up else None


def _looks_up(value: ast.expr, own: str, method: Function) -> bool:
    match value:
        case ast.Subscript(value=ast.Attribute(value=ast.Subscript() as outer)):
            return _looks_up(outer, own, method)  # `self.frames[number].tiles[n]`
        case ast.Subscript(value=table, slice=key):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Attribute() as table, attr="get"), args=[key, *_]):
            pass
        case ast.Call(func=table, args=[key]):
            pass
        case _:
            return False
    return own_attribute(table, own) is not None and bool(names_in(key) & set(method.parameters[1:]))


# What is read -----------------------------------------------------------------------------------------------


def before(filling: Filling) -> Iterator[ast.AST]:
    """What the method says up to the store, and in the store itself but for where it goes."""
    target = {id(filling.target), id(getattr(filling.target, "value", None))}
    for node in filling.method.nodes:
        if getattr(node, "lineno", filling.line + 1) <= filling.line and id(node) not in target:
            yield node


def attributes_before(filling: Filling) -> Iterator[ast.Attribute]:
    return (node for node in before(filling) if isinstance(node, ast.Attribute))


def _any_speaks_of(nodes: Sequence[ast.AST], field: str, owners: Set[str | None]) -> bool:
    """`self.ledger.hold(n)` asks a ledger for a hold, not for the field `hold` of the owners."""
    methods = {
        id(node.func)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if not isinstance(node.func.value, ast.Name) or node.func.value.id not in owners
    }
    return any(
        id(node) not in methods
        and (_attr(node) == field or (isinstance(node, ast.Constant) and node.value == field))
        for node in nodes
    )


def _attr(node: ast.AST) -> str:
    return getattr(node, "attr", "")


def calls_who_speaks(
    call: ast.Call, own: str, field: str, family: Sequence[Function], seen: frozenset[str] = frozenset()
) -> bool:
    """`self.drop_last()`, or a method of a base that nobody has read."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr=called) if name == own:
            pass
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=called):
            pass
        case _:
            return False
    if called in seen:
        return False
    methods = [method for method in family if method.name == called]
    if not methods and any(_keeps(method, called) for method in family):
        return False  # a function that the object was told
    return not methods or any(
        _any_speaks_of(method.nodes, field, {method.owner, *method.parameters})
        or any(
            calls_who_speaks(inner, method.owner or "", field, family, seen | {called})
            for inner in method.calls
        )
        for method in methods
    )


def _keeps(method: Function, field: str) -> bool:
    """`self.fetch = fetch`, or `fetch: Callable` of a dataclass."""
    declared = method.cls.node.body if method.cls is not None else []
    return any(
        isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == field for node in declared
    ) or any(own_attribute(target, method.owner or "") == field for target, _ in assignments(method))


def _is_a_state(asked: ast.Attribute, own: str, method: Function, family: Sequence[Function]) -> bool:
    """Some function sets it, other than where an object is made: of the class, for a field of its own."""
    others = () if own_attribute(asked, own) else method.module.by_node.values()
    return any(
        node.attr == asked.attr and isinstance(node.ctx, ast.Store)
        for function in (*family, *others)
        if function.name not in ("__init__", "<module>")
        for node in attributes_in(function.node)
    )


def tests_in(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    return (test for node in nodes if isinstance(test := getattr(node, "test", None), ast.AST))


def attributes_in(node: ast.AST) -> Iterator[ast.Attribute]:
    return (inner for inner in walk(node) if isinstance(inner, ast.Attribute))


def names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in walk(node) if isinstance(inner, ast.Name)}


def is_none(node: ast.AST | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)

"""Whether a class reckons with a second call of a method that fills a field: what its other methods do about
theirs, what is put in, who empties it."""

import ast
import re
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import assigned_by, given_to, own_attribute
from auditor.project.code.field_paths import mentions
from auditor.project.code.lineage import Lineage
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import (
    Filling,
    attributes_in,
    before,
    fillings,
    is_none,
    made_of,
    names_in,
    same,
)
from auditor.project.fields.names_of_refillers import follows_another
from auditor.project.fields.told_another_key import looked_up
from auditor.protocols.vocabulary import ACQUIRE_WORDS, KEEPING, split
from auditor.source.nodes import walk

LEAVING = (ast.Break, ast.Return, ast.Raise, ast.Continue, ast.Yield, ast.YieldFrom)

OPENING = re.compile(
    r"_*(?:re_?)?(?:open|connect|start|init|initiali[sz]e|set_?[uU]p|load|create|build|make|spawn|launch|begin|attach"
    r"|login|bind|listen|run|enter|prepare)(?:_|$)"
)
"""Methods that are called when there is nothing, or nothing any more."""

COMING = re.compile(rf"{OPENING.pattern}|_*(?:re_?)?(?:register|add|insert|admit|new)(?:_|$)")
"""Methods that are called for what has not been there."""

LOCKING = re.compile(r"_*(?:acquire|lock|take|borrow|checkout)(?:_|$)")
"""Methods whose callers are told by the name that they get something to give back."""

SETTING = re.compile(
    r"_*(?:set|switch|change|select|update|replace|swap|rotate|renew|refresh|resize|rebuild|reload)(?:_|$)"
)
"""Methods that are there to be called whenever something else is wanted."""


def comes_in_pairs(name: str) -> bool:
    """`start`, `attach`, `reserve`: whoever calls it calls its counterpart before he calls it again."""
    first = next(iter(split(name)), "")
    begins = LOCKING.match(name) or COMING.match(name)
    return begins is not None or first in ACQUIRE_WORDS


def puts_in(filling: Filling) -> bool:
    """What the caller brought goes into the lease: `self.stage.copy_(batch)`. Next time he brings more."""
    method = filling.method
    brought = set(method.parameters[1:])
    lent = set() if filling.key is not None else {ast.unparse(filling.target)}
    stored = getattr(filling.statement, "value", None)
    if isinstance(stored, ast.Name):
        lent.add(stored.id)
    for node in method.statements:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=changed), args=args)):
                given: list[ast.expr] = list(args)
            case ast.Assign(targets=[ast.Subscript(value=changed)], value=value):
                given = [value]
            case _:
                continue
        into = {ast.unparse(each) for each in walk(changed) if isinstance(each, ast.expr)}
        if into & lent and any(names_in(each) & brought for each in given):
            return True
    return False


def turns_over(
    caller: Function, filling: Filling, enders: Sequence[Function], family: Sequence[Function]
) -> bool:
    """A loop of another method calls it each time on its own object, and only works with what is in the
    field; so do the methods that it calls beside."""
    own = caller.owner or ""
    ending = {ender.name for ender in enders}
    involved = {method.name for method in family if mentions(method, filling.field)} | ending
    helping = {method.name for method in family if not KEEPING.match(method.name)} - involved
    for loop in caller.statements:
        if not isinstance(loop, ast.For | ast.AsyncFor | ast.While):
            continue
        inside = [node for statement in loop.body for node in walk(statement)]
        calls = [node for node in inside if isinstance(node, ast.Call)]
        called = {own_attribute(call.func, own) for call in calls}
        leaves = any(isinstance(node, LEAVING) for node in inside)
        worked_with = {id(node.value) for node in inside if isinstance(node, ast.Attribute | ast.Subscript)}
        asked = (call for call in calls if own_attribute(call.func, own) in helping)
        worked_with |= {id(argument) for call in asked for argument in call.args}
        speaks = any(
            isinstance(node, ast.Attribute)
            and (node.attr in ending or (node.attr == filling.field and id(node) not in worked_with))
            for node in inside
        )
        others = called & involved - {filling.method.name}
        if filling.method.name in called and not (leaves or speaks or others):
            return True
    return False


def takes_out(method: Function, field: str) -> bool:
    """What is there is there no more afterwards: `return self.ready.pop(key)`."""
    own = method.owner or ""
    for node in method.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=table, attr="pop" | "popitem")):
                if own_attribute(table, own) == field:
                    return True
            case ast.Delete(targets=targets):
                if any(own_attribute(getattr(each, "value", each), own) == field for each in targets):
                    return True
            case ast.Assign() if _empties(node, own, field):
                return True
    return False


def _empties(node: ast.Assign, own: str, field: str) -> bool:
    """`self.field = None`, also beside others: `old, self.field = self.field, None`."""
    return any(own_attribute(to, own) == field and _is_nothing(value) for to, value in assigned_by(node))


def _is_nothing(value: ast.expr) -> bool:
    return is_none(value) or (isinstance(value, (ast.List, ast.Tuple)) and not value.elts)


def speaking_for(filling: Filling, family: Sequence[Function], model: Lineage) -> list[Function]:
    """Not methods of a derived class that have to do with fields of their own, of which its base knows
    nothing."""
    if filling.method.cls is None:
        return list(family)
    bases = model.lineage(filling.method.cls)
    return [each for each in family if each.cls in bases or mentions(each, filling.field)]


def others_look_first(filling: Filling, call: ast.Call, family: Sequence[Function]) -> bool:
    """Another method that takes from the same pool does look what is in its field, or what stands under the
    same key in its table. That a `reassign(request)` ends the one there says of this method that it comes
    first, if the key is the request's own: a name that callers make up may come twice."""
    own_key = isinstance(filling.key, ast.Attribute)
    first = own_key and not follows_another(filling.method.name, True)
    for method in family:
        own = method.owner
        if method is not filling.method and own is not None and method.name != "__init__":
            for other in all_fillings(method, own):
                if not _under_alike(other, filling):
                    continue
                if first and follows_another(method.name, True):
                    continue
                if looks_and_takes(other, call) or _ends_and_takes(other, filling, call, family):
                    return True
    return False


def _ends_and_takes(other: Filling, filling: Filling, call: ast.Call, family: Sequence[Function]) -> bool:
    """`self.unpin(name)` before `self.pinned[name] = pool.use(name)`, of the table that is asked about."""
    if other.key is None or other.field != filling.field or not lent_alike(other, call):
        return False
    if filling.key is None or not same(other.key, filling.key):
        return False  # `self.free(child)` in a `fork(parent, child)` says nothing of `admit(request)`
    taking = {method.name for method in family if takes_out(method, other.field)}
    return any(
        isinstance(node, ast.Call)
        and own_attribute(node.func, other.owner) in taking
        and any(same(made_of(other.method, each), other.key) for each in node.args)
        for node in before(other)
    )


def _under_alike(one: Filling, other: Filling) -> bool:
    """The keys are called the same, or told by the callers of both methods into one table."""
    if one.key is None or other.key is None:
        return one.key is other.key
    return same(one.key, other.key) or (
        one.field == other.field and told_by_its_caller(one) and told_by_its_caller(other)
    )


def _each_told(node: ast.AST, told: Set[str]) -> Iterator[str]:
    """`unit` of `for unit in units:`, or of some of them, `name` of `for name, part in parts.items():`."""
    if not isinstance(node, ast.For | ast.comprehension):
        return
    match node.target, node.iter:
        case ast.Name(id=name), ast.Name(id=over):
            pass
        case ast.Name(id=name), ast.Subscript(value=ast.Name(id=over), slice=ast.Slice()):
            pass
        case (
            ast.Tuple(elts=[ast.Name(id=name), _]),
            ast.Call(func=ast.Attribute(value=ast.Name(id=over), attr="items"), args=[]),
        ):
            pass
        case _:
            return
    if over in told:
        yield name


def told_by_its_caller(filling: Filling) -> bool:
    """The key is what a parameter says, or one of several, and no number that the method draws."""
    bound = {
        node.id
        for node in filling.method.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    told = set(filling.method.parameters[1:]) - bound
    told |= {name for node in filling.method.nodes for name in _each_told(node, told)}
    key = filling.key
    parts = key.elts if isinstance(key, ast.Tuple) else [key]
    own = filling.method.owner or ""
    others = [part for part in parts if part is None or own_attribute(part, own) is None]
    for part in others or parts:
        while isinstance(part, ast.Attribute | ast.Call):
            part = _told_of(part) if isinstance(part, ast.Call) else part.value
        if not isinstance(part, ast.Name) or part.id not in told:
            return False
    return True


def _told_of(key: ast.Call) -> ast.expr | None:
    """`parameter` of `id(parameter)`, which is another way to say which one."""
    named = isinstance(key.func, ast.Name) and key.func.id in ("id", "str", "int", "hash", "tuple")
    return key.args[0] if named and len(key.args) == 1 else None


def makes_known(filling: Filling, later: Function, family: Sequence[Function]) -> bool:
    """It enters the key elsewhere as well, `self.params[key] = params`, `self.live.add(key)`, from where that
    goes some time, and the later method does not: that one may come again for a key, this one comes once."""
    if filling.key is None or (own := later.owner) is None:
        return False
    known = _entered(filling.method, filling.owner, filling.key) - _entered(later, own, filling.key)
    known -= {filling.field}
    return any(
        takes_out(method, field) or _strikes_off(method, field) for field in known for method in family
    )


def _entered(method: Function, owner: str, key: ast.expr) -> set[str]:
    """Tables and sets of the object that hold the key afterwards."""
    found = {
        each.field for each in all_fillings(method, owner) if each.key is not None and same(each.key, key)
    }
    for call in method.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=held, attr="add"), args=[entered]):
                if same(made_of(method, entered), key) and (field := own_attribute(held, owner)):
                    found.add(field)
    return found


def _strikes_off(method: Function, field: str) -> bool:
    own = method.owner or ""
    ways = (call.func for call in method.calls if isinstance(call.func, ast.Attribute))
    return any(way.attr in ("discard", "remove") and own_attribute(way.value, own) == field for way in ways)


def all_fillings(method: Function, owner: str) -> Iterator[Filling]:
    for field in sorted({node.attr for node in attributes_in(method.node) if own_attribute(node, owner)}):
        yield from fillings(method, owner, field)


def looks_and_takes(other: Filling, call: ast.Call) -> bool:
    return lent_alike(other, call) and any(looks_into(node, other) for node in before(other))


def lent_alike(other: Filling, call: ast.Call) -> bool:
    """What it stores comes out of the same pool, by this method or another one of the pool, or is marked by
    the same method: `tree.pin(node)`, `node.pin()`."""
    stored = getattr(other.statement, "value", None)
    if not isinstance(stored, ast.expr):
        return False
    if any(_marks(each, call, names_in(stored)) for each in other.method.calls):
        return True
    names = (
        () if isinstance(stored, ast.BinOp) else names_in(stored)
    )  # of `total + start.elapsed(stop)` no lease
    values = [stored, *(value for name in names for value in given_to(other.method, name))]
    return any(
        isinstance(each, ast.Call) and _pool_of(each) == _pool_of(call)
        for value in values
        for each in walk(value)
    )


def _marks(each: ast.Call, call: ast.Call, stored: set[str]) -> bool:
    match each.func, call.func:
        case ast.Attribute(value=of, attr=way), ast.Attribute(attr=same_way) if way == same_way:
            return any(isinstance(node, ast.Name) and node.id in stored for node in (of, *each.args))
    return False


def _pool_of(call: ast.Call) -> str:
    """`self.pool` of `self.pool.take()`, `open` of `open(path)`."""
    return ast.unparse(call.func.value if isinstance(call.func, ast.Attribute) else call.func)


def looks_into(node: ast.AST, other: Filling) -> bool:
    """The field is read; of a table, whether the key is in it, or what stands there."""
    if other.key is None:
        return isinstance(node, ast.Attribute) and own_attribute(node, other.owner) == other.field
    return any(
        own_attribute(table, other.owner) == other.field and same(made_of(other.method, asked), other.key)
        for table, asked in looked_up(node)
    )

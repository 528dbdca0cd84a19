"""Fields of objects that a method is given, or finds in a table: which of them may hold a lease already when
the method puts another one there."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence, Set

from auditor.ir.ops import ANY_ITEM
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.field_paths import own_field
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING
from auditor.project.fields.filling_again import Filling, before, fillings, found_in_a_table
from auditor.project.fields.names_of_refillers import is_the_new_one
from auditor.project.fields.reckoning import all_fillings, comes_in_pairs, looks_and_takes, told_by_its_caller
from auditor.project.meaning.library import REPLACING
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk

RENEWING = re.compile(
    r"_*(?:switch|change|update|replace|swap|rotate|renew|refresh|resize|rebuild|reload|regrow|refill|re_?assign"
    r"|re_?alloc\w*|re_?generate|re_?map|reset|restart|re_?target|re_?bind|re_?seat|re_?place|relocate|migrate"
    r"|move|heal|recover|promote|upgrade)(?:_|$)"
)
"""Methods that are given what has been there for a while."""

STEPPING = re.compile(
    r"_*(?:run_|train_|training_|decode_|forward_)?(?:step|tick|iterate|round|decode|poll)s?(?:_|$)"
)
"""Methods that are called over and over."""

LOOPS = (ast.For, ast.AsyncFor)
CHOICES = (ast.If, ast.Try, ast.Match)


def filled_before(
    filling: Filling,
    call: ast.Call,
    family: Sequence[Function],
    enders: Sequence[Function],
    admitted: Set[str] = frozenset(),
) -> bool:
    """Such objects are filled more than once. `admitted`: tables of the object into which others put such
    objects with the field filled."""
    method, owner = filling.method, filling.owner
    found = found_in_a_table(method, owner)
    if found is not None:
        known = table_of(found) in admitted or _others_fill_known_ones(filling, call, family)
        return known and not any(_is_an_end_of_it(node, filling) for node in before(filling))
    if owner not in method.parameters[1:] or is_the_new_one(owner) or _may_be_ended_before(filling):
        return False
    if changes_places(filling, family):
        return False
    if in_each_step(filling, family, enders):
        return True
    if RENEWING.match(method.name) is None:
        return False
    looked_at = _others_fill_known_ones(filling, call, family) or _others_add_to_it(filling, family)
    return looked_at or bool(admitted)


def changes_places(filling: Filling, family: Sequence[Function]) -> bool:
    """`page.host = buffer` beside `page.device = None`, and in another method the other way round: what is in
    the one place is not in the other."""
    emptied = {field for field, empty in _set(filling.method, filling.owner) if empty} - {filling.field}
    return any(
        (filling.field, True) in (written := set(_set(each, owner)))
        and any((field, False) in written for field in emptied)
        for each in family
        if each is not filling.method
        for owner in each.parameters[1:]
    )


def _set(method: Function, owner: str) -> Iterator[tuple[str, bool]]:
    """Fields of an object that the method sets, each with whether to None."""
    for target, value in assignments(method):
        if (field := own_attribute(target, owner)) is not None:
            yield field, isinstance(value, ast.Constant) and value.value is None


def tables_filled_with(
    others: Iterable[Outcome], outcome: Outcome, family: Sequence[Function], field: str
) -> frozenset[str]:
    """Tables of the object into which other methods put objects that have such a lease in that field."""
    return frozenset(
        path[1][1:]
        for other in others
        if other.function is not outcome.function
        and other.function in family
        and other.acquisition.protocol == outcome.acquisition.protocol
        for path in (*(path for _, path in other.stored), *other.beside)
        if own_field(other.function, path) and path[2:] == (ANY_ITEM, field)
    )


def table_of(lookup: ast.expr) -> str:
    """`sessions` of `self.sessions[key]` and of `self.sessions.get(key)`."""
    match lookup:
        case ast.Subscript(value=ast.Attribute(attr=table)):
            return table
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=table), attr="get")):
            return table
    return ""


def in_each_step(filling: Filling, family: Sequence[Function], enders: Sequence[Function]) -> bool:
    """`for request in self.running: self.start_draft(request)` in a method that is called over and over, and
    that ends what is there on a condition only, or never."""
    ending = {ender.name for ender in enders}
    for caller in family:
        own = caller.owner
        if own is None or not STEPPING.match(caller.name):
            continue
        for loop in caller.statements:
            if isinstance(loop, LOOPS) and _goes_over_its_own(loop, own):
                always = [
                    call for each in loop.body if not isinstance(each, CHOICES) for call in _calls(each)
                ]
                called = [last_name(call) for call in always]
                speaks = any(getattr(node, "attr", "") == filling.field for node in walk(loop))
                if filling.method.name in called and ending.isdisjoint(called) and not speaks:
                    return True
    return False


def _goes_over_its_own(loop: ast.For | ast.AsyncFor, own: str) -> bool:
    """`self.running`, `list(self.running)`, `self.running.values()`."""
    return any(isinstance(node, ast.expr) and own_attribute(node, own) for node in walk(loop.iter))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (inner for inner in walk(node) if isinstance(inner, ast.Call))


def _may_be_ended_before(filling: Filling) -> bool:
    """Some call is given the object before, or is a method of it that speaks of an end."""
    for node in before(filling):
        if isinstance(node, ast.Call):
            told = any(getattr(argument, "id", None) == filling.owner for argument in node.args)
            if told or _is_an_end_of_it(node, filling):
                return True
    return False


def _is_an_end_of_it(node: ast.AST, filling: Filling) -> bool:
    """`request.finish()`, whose `request.adapter` is filled."""
    if not isinstance(node, ast.Call) or own_attribute(node.func, filling.owner) is None:
        return False
    return ENDING.search(last_name(node)) is not None


def _others_fill_known_ones(filling: Filling, call: ast.Call, family: Sequence[Function]) -> bool:
    """Another method finds an object in the same way, puts what the pool lends into a field of it, and sees
    to what was there."""
    given = filling.owner in filling.method.parameters
    return any(
        looks_and_takes(other, call)
        for method in family
        if method is not filling.method
        for name in (method.parameters[1:] if given else _found(method))
        for other in all_fillings(method, name)
    )


def others_look_into_it(filling: Filling, call: ast.Call, family: Sequence[Function]) -> bool:
    """Of other methods that are given such an object and fill a table of it under a key, one is called first,
    and one sees to what was there: so there may be one under the key that the caller tells."""
    if filling.owner not in filling.method.parameters or not told_by_its_caller(filling):
        return False
    others = [
        other
        for method in family
        if method is not filling.method
        for name in method.parameters[1:]
        for other in fillings(method, name, filling.field)
        if other.key is not None
    ]
    begun = any(comes_in_pairs(other.method.name) for other in others)
    return begun and any(looks_and_takes(other, call) for other in others)


def _found(method: Function) -> Iterator[str]:
    names = {target.id for node in method.statements for target in _bound(node)}
    return (name for name in sorted(names) if found_in_a_table(method, name) is not None)


def _bound(node: ast.stmt) -> Iterator[ast.Name]:
    if isinstance(node, ast.Assign):
        yield from (target for target in node.targets if isinstance(target, ast.Name))


def _others_add_to_it(filling: Filling, family: Sequence[Function]) -> bool:
    """`request.blocks += more` in another method: what is there is kept there."""
    for method in family:
        for node in method.statements if method is not filling.method else ():
            match node:
                case ast.AugAssign(target=ast.Attribute(attr=field)):
                    pass
                case ast.Expr(
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Attribute(attr=field), attr="extend" | "append")
                    )
                ):
                    pass
                case _:
                    continue
            if field == filling.field:
                return True
    return False


def put_in_its_place(method: Function, call: ast.Call, holder: str) -> Iterator[Filling]:
    """`self.chunks[key] = replace(chunk, pages=fresh)` of a chunk that was found there, and nobody looks at
    its pages: the new record takes the old one's place."""
    for node in method.statements:
        match node:
            case ast.Assign(targets=[ast.Subscript() as target], value=ast.Call(func=way) as made):
                old = next(iter(made.args), None)
                if isinstance(way, ast.Attribute) and way.attr == "_replace":
                    old = way.value
            case _:
                continue
        owner = getattr(old, "id", "") if last_name(made) in REPLACING else ""
        for new in made.keywords if owner and found_in_a_table(method, owner) is not None else ():
            lent = new.value is call or (holder and getattr(new.value, "id", "") == holder)
            given = [argument for each in method.calls if each is not made for argument in each.args]
            whole = any(getattr(argument, "id", "") == owner for argument in given)
            if lent and new.arg and f"{owner}.{new.arg}" not in method.text and not whole:
                yield Filling(method, owner, new.arg, node, target)

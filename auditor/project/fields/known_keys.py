"""Whether a class reckons with a key that is in a table already when a method of it puts a lease there."""

import ast
import re
from collections.abc import Sequence

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import (
    Filling,
    attributes_in,
    before,
    leaving,
    made_of,
    names_in,
    same,
    tests_in,
)
from auditor.project.fields.names_of_refillers import EACH_STEP
from auditor.project.fields.outgrown import LIKENESS
from auditor.project.fields.reckoning import (
    COMING,
    SETTING,
    takes_out,
    told_by_its_caller,
)
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import negates
from auditor.source.nodes import walk

NAMES = re.compile(
    r"(?:\w+_)?(?:name|label|tag|path|worker|segment|size|bs|width|numel|shape|dtype|layer|layer_i\w+|bucket|device|rank|stage|kind|mode"
    r"|digest|\w*hash|mb|micro_?batch|prefix)"
)
"""Keys that are few and come again, as against the numbers of requests."""

OWNERS = re.compile(
    r"(?:\w+_)?(?:tenant|node|peer|host|replica|adapter|lora|model|expert|tower|topic|template|schema|group|shard"
    r"|partition|owner|viewer|watcher|reader|consumer|subscriber|listener|observer|actor"
    r"|user|problem|image)(?:_i\w+)?"
)
"""Parameters that name whom a lease is for: they outlive it, and come again for the next one."""

SESSIONS = re.compile(r"(?:\w+_)?(?:sid|(?:session|client|conn|connection|user)_id)")
"""Keys that clients make up, and bring again whenever they come again."""

HOLDING = re.compile(r"_*(?:pin|hold|lock|keep|retain|share|insert)(?:_|$)")
"""Methods that hold what is there already for somebody else, who may say so twice."""

RESETTING = re.compile(r"_*(?:reset|renew|refresh|rebuild|rotate|restart|reseed)(?:_|$)")
"""Methods after which each key has another one."""


def names_a_place(filling: Filling, family: Sequence[Function]) -> bool:
    """`mark(label)`, `pin(key)`: callers say a name again, and the method does not say by its own that there
    is none; not `save(layer)` beside `load(layer)`, who asks back what he put in. Clients open their session
    again whenever they like."""
    key = filling.key
    last = key.attr if isinstance(key, ast.Attribute) else getattr(key, "id", "")
    if SESSIONS.fullmatch(last) or (last == "session" and not _is_undone(filling.method, family)):
        return plain_table(family, filling.field)
    comes_again = NAMES.fullmatch(last) or (last == "key" and HOLDING.match(filling.method.name))
    comes_again = comes_again or (isinstance(key, ast.Name) and OWNERS.fullmatch(last))
    if not comes_again or COMING.match(filling.method.name) or not plain_table(family, filling.field):
        return False
    return not any(takes_out(each, filling.field) and _brings_back(each, filling.field) for each in family)


def _is_undone(method: Function, family: Sequence[Function]) -> bool:
    """`unbind(session)` beside `bind(session)`: of the session itself, which has no name to come again by."""
    return any(negates(each.name, method.name) for each in family)


def _brings_back(method: Function, field: str) -> bool:
    """`slab, size = self.by_layer.pop(layer)`, and `return bytes(slab[:size])`; not that there was one."""
    own = method.owner or ""
    names: set[str] = set()
    for target, value in assignments(method):  # in the order of the lines
        if names_in(value) & names or any(own_attribute(each, own) == field for each in attributes_in(value)):
            names |= names_in(target) - {own}
    returned = (node.value for node in method.statements if isinstance(node, ast.Return) and node.value)
    return any(
        names_in(value) & names for value in returned if not isinstance(value, ast.Compare | ast.UnaryOp)
    )


def known_elsewhere(filling: Filling) -> bool:
    """`if request in self.running:` around the store: what the key stands for has been there for a while."""
    assert filling.key is not None
    own = filling.method.owner or ""
    for test in tests_in(list(before(filling))):
        match test:
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[table]):
                if same(made_of(filling.method, left), filling.key) and own_attribute(table, own):
                    return True
    return False


def is_of_what_it_holds(filling: Filling) -> bool:
    """`tuple(request.tokens[:n])`, `hashed.hexdigest()`: what has the same beginning has the same key."""
    match filling.key:
        case ast.Call(
            func=ast.Name(id="tuple" | "frozenset" | "hash"), args=[ast.Subscript(slice=ast.Slice())]
        ):
            return True
        case ast.Call(func=ast.Attribute(attr="digest" | "hexdigest"), args=[]):
            return True
    return False


def known_under_it(filling: Filling) -> bool:
    """`if self.sizes.get(name) == size: return self.buffers[name]`: what is known of the one that is there
    decides whether it does."""
    own = filling.method.owner or ""
    for asked in leaving(filling):
        if isinstance(asked.test, ast.Compare) and isinstance(asked.test.ops[0], LIKENESS):
            for node in walk(asked.test):
                match node:
                    case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[key, *_]):
                        pass
                    case ast.Subscript(value=table, slice=key):
                        pass
                    case _:
                        continue
                if own_attribute(table, own) and filling.key is not None and same(key, filling.key):
                    return True
    return False


def replaces_what_is_known(filling: Filling, family: Sequence[Function]) -> bool:
    """`replace(request_id, blocks)`, where another method adds to what stands under such a key;
    `reset_peaks()` of each name that another table of the object has."""
    method, key = filling.method, filling.key
    own = method.owner or ""
    if SETTING.match(method.name) and told_by_its_caller(filling):
        return any(
            _adds(node, each.owner or "", filling.field) for each in family for node in walk(each.node)
        )
    over = [
        n for n in method.statements if isinstance(n, ast.For) and key is not None and same(n.target, key)
    ]
    itself = any(isinstance(each.iter, ast.expr) and own_attribute(each.iter, own) for each in over)
    return itself and RESETTING.match(method.name) is not None


def only_emptied_as_a_whole(filling: Filling, family: Sequence[Function], enders: Sequence[Function]) -> bool:
    """`observe(tokens)` enters what it is told under what it is told, and nobody ever takes one entry out:
    until `flush()` a key comes as often as it likes."""
    method, key = filling.method, filling.key
    if key is None or not EACH_STEP.match(method.name) or any(map(own_parameters, enders)):
        return False
    told = field_work(method).derived(set(own_parameters(method)), frozenset())
    alone = not any(field == filling.field for each in family for field, _ in field_work(each).removed)
    return alone and not names_in(key).isdisjoint(told)


def _adds(node: ast.AST, own: str, field: str) -> bool:
    """`self.tables.setdefault(key, []).append(page)`, `self.tables[key].extend(pages)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Attribute(value=table, attr="setdefault")))):
            return own_attribute(table, own) == field
        case ast.Call(func=ast.Attribute(value=ast.Subscript(value=table), attr="append" | "extend")):
            return own_attribute(table, own) == field
    return False


def plain_table(family: Sequence[Function], field: str) -> bool:
    """Made of Python's own tables, which do nothing about what they let go of."""
    for method in family:
        own = method.owner
        for node in method.statements if own is not None else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            made = any(isinstance(t, ast.expr) and own_attribute(t, own or "") == field for t in targets)
            if made and isinstance(value, ast.Call) and not _is_plain(value):
                return False
    return True


def _is_plain(made: ast.Call) -> bool:
    return getattr(made.func, "attr", getattr(made.func, "id", "")) in (
        "dict",
        "OrderedDict",
        "defaultdict",
        "field",
    )

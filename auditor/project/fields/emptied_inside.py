"""Tables within the records of a table, of which a method lets go though others give back what lies there:

    self.halls[name].spots.clear()        hall = self.halls[name]
                                          hall.spots = []       or  hall.spots = hall.spots[:keep]

and rows or whole records in whose place a method puts an empty one: `self.plans[level] = []` in
`replan(level)`, `old = self.sensors[name]`, `self.sensors[name] = Sensor(old.name)`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assigned_by, assignments, given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.in_its_hands import is_looked_up
from auditor.project.fields.names_of_refillers import follows_another
from auditor.project.fields.ways_out import SAYING
from auditor.source.nodes import walk

MAKING = frozenset({"list", "dict", "set", "deque", "defaultdict", "OrderedDict"})


def emptied_inside(method: Function, table: str, inner: str) -> Iterator[ast.AST]:
    """Where it does so to what the records of the table have in a field `inner`, or to whole rows without
    one."""
    if method.owner is None or method.name in INITIAL or f".{table}" not in method.text:
        return
    letting_go = [node for node in method.statements if inner and _empties(method, node, table, inner)]
    if letting_go and not _reads(method, inner, letting_go):
        yield from letting_go
    for node in method.statements:
        for target, value in assigned_by(node):
            its = isinstance(target, ast.Subscript) and own_attribute(target.value, method.owner) == table
            if its and _is_new(value, bool(inner)) and _is_there(method, node, target, table, inner):
                yield node


def _empties(method: Function, node: ast.stmt, table: str, inner: str) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=held, attr="clear" | "pop" | "popitem"))):
            pass
        case ast.Assign(targets=[held], value=value) if _is_new(value, False):
            pass
        case ast.Delete(targets=[ast.Subscript(value=held)]):
            pass
        case ast.Assign(targets=[held], value=ast.Subscript(value=whole, slice=ast.Slice())):
            if ast.unparse(held) != ast.unparse(whole):
                return False
        case _:
            return False
    match held:
        case ast.Attribute(value=record, attr=field) if field == inner:
            return _is_of_the_table(method, record, table)
    return False


def _is_of_the_table(method: Function, record: ast.expr, table: str) -> bool:
    values = list(given_to(method, record.id)) if isinstance(record, ast.Name) else [record]
    own = method.owner or ""
    return bool(values) and all(is_looked_up(each, own, table) for each in values)


def _reads(method: Function, inner: str, aside: list[ast.stmt]) -> bool:
    """More than how many there are, and whether one is there."""
    known = {id(each) for node in aside for each in walk(node)}
    known |= {id(each) for node in method.nodes if isinstance(node, ast.Compare) for each in node.comparators}
    known |= {id(part) for call in method.calls for part in walk(call) if _says(call)}
    return any(
        isinstance(node, ast.Attribute) and node.attr == inner and id(node) not in known
        for node in method.nodes
    )


def _says(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in SAYING


def _is_new(value: ast.expr, record: bool) -> bool:
    match value:
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=ast.Name(id=name), args=args):
            return (name in MAKING and not args) or (record and name.lstrip("_")[:1].isupper())
    return False


def _is_there(method: Function, node: ast.stmt, target: ast.expr, table: str, inner: str) -> bool:
    """By the record that it looks up under the key, and only reads other fields of; or by its name, where it
    says nothing else of the table."""
    own, key = method.owner or "", ast.unparse(getattr(target, "slice", target))
    spoken = [each for each in method.nodes if isinstance(each, ast.Attribute) and each.attr == table]
    if len(spoken) == 1:
        return follows_another(method.name, keyed=True)
    names = [
        to.id
        for to, value in assignments(method)
        if isinstance(to, ast.Name)
        and isinstance(value, ast.Subscript)
        and value.lineno < node.lineno
        and own_attribute(value.value, own) == table
        and ast.unparse(value.slice) == key
    ]
    if len(names) != 1 or len(spoken) != 2 or not inner:
        return False
    parts = {
        id(each.value) for each in method.nodes if isinstance(each, ast.Attribute) and each.attr != inner
    }
    loads = [each for each in method.nodes if isinstance(each, ast.Name) and each.id == names[0]]
    return all(isinstance(each.ctx, ast.Store) or id(each) in parts for each in loads) and not any(
        own_attribute(call.func, names[0]) for call in method.calls
    )

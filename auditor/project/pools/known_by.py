"""Whether somebody who has a number, or a text, of a lent object can come to the object by it."""

import ast
import re
from collections.abc import Iterator, Set

from auditor.ir.calls import LOGGING, PUTTING
from auditor.project.code.bindings import given_to_field
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.pools.halves import Pair
from auditor.project.pools.plain_memory import is_row
from auditor.project.shapes.reference_counts import counts_what_it_returns
from auditor.source.nodes import walk

LOOKING_UP = frozenset({"pop", "get", "discard", "add", "remove", "setdefault"})
"""Methods of a table, or of a set, that are told a key."""

SAYING = LOGGING | {"len", "print", "sum", "min", "max", "str", "repr", "format"}
"""What tells nobody more than a text or a measure."""

NUMBERS = re.compile(r"(?:list\(range|(?:collections\.)?(?:Counter\(\)|defaultdict\((?:int|float)\)))")
"""Tables of numbers, as they are made."""


def known_by(pool: Class, field: str, pair: Pair) -> bool:
    """Whether the pool's code leads from the number back to the object: a list of such numbers, a table that
    is looked into under a number of somebody else's. In `self.busy[buf.bid]`, and no other way, nobody is
    found but who has the buffer; in `self.spare[line.to].append(line)` lie those that nobody has."""
    parents = {id(child): node for node in walk(pool.node) for child in ast.iter_child_nodes(node)}
    ending = {id(node) for half in pair.releases for node in walk(half.function.node)}
    tables = set()
    for node in walk(pool.node):
        if not (isinstance(node, ast.Attribute) and node.attr == field) or isinstance(node.ctx, ast.Store):
            continue
        if _is_laid_on_a_pile(node, parents) or _is_cut(node, parents) or _picks_out_rows(node, parents):
            continue
        table = _key_of(node, parents)
        parent = parents.get(id(node))
        if table is not None:
            tables.add(table)
        elif isinstance(parent, ast.Call) and _says_it(parent, ended=id(node) in ending):
            continue
        elif isinstance(parent, ast.Call | ast.Tuple | ast.List | ast.Subscript):
            return True
    passing = {id(node) for method in _counting_anew(pool, pair) for node in walk(method.node)}
    return any(
        _looked_into_by_others(pool, table, field, passing)
        for table in tables
        if not _has_numbers(pool, table)
    )


def _counting_anew(pool: Class, pair: Pair) -> Iterator[Function]:
    """`retain(digest)`, which counts one user more of what lies there: to nobody's end."""
    ends = [half.function for half in pair.releases]
    return (method for method in pool.methods.values() if counts_what_it_returns(method, ends))


def _says_it(call: ast.Call, *, ended: bool) -> bool:
    """`len(blob.data)`, `log.debug("gone: %s", blob.key)`, and `heard(blob.key)` of what has come back."""
    name = last_part(call.func)
    return name in SAYING or (ended and isinstance(call.func, ast.Name))


def _picks_out_rows(node: ast.expr, parents: dict[int, ast.AST]) -> bool:
    """`self.rows[lease.expert, lease.low : lease.high]` of an array: no key is a stretch."""
    index = parents.get(id(node))
    return isinstance(index, ast.Tuple) and any(isinstance(each, ast.Slice) for each in index.elts)


def _has_numbers(pool: Class, table: str) -> bool:
    """`self.top = [0] * lanes`, `self.open = defaultdict(int)`: there is no object to be found."""
    born = (value for method in pool.methods.values() for value in given_to_field(method, table))
    return any(is_row(value) or NUMBERS.match(ast.unparse(value)) is not None for value in born)


def _is_cut(node: ast.expr, parents: dict[int, ast.AST]) -> bool:
    """`wider.data[:n] = buffer.data[:n]` moves what is in the one to the other."""
    parent = parents.get(id(node))
    if (
        not isinstance(parent, ast.Subscript)
        or parent.value is not node
        or not isinstance(parent.slice, ast.Slice)
    ):
        return False
    whole = parents.get(id(parent))
    return isinstance(whole, ast.Assign) and all(
        isinstance(each, ast.Subscript) for each in (whole.value, *whole.targets)
    )


def _key_of(node: ast.expr, parents: dict[int, ast.AST]) -> str | None:
    """`busy` of `self.busy[node]`, `self.busy.pop(node)`, `node in self.busy`."""
    parent = parents.get(id(node))
    match parent:
        case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr=table), slice=key) if key is node:
            return table
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name(), attr=table), attr=asked),
            args=[key, *_],
        ) if key is node and asked in LOOKING_UP:
            return table
        case ast.Compare(
            left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute(value=ast.Name(), attr=table)]
        ) if key is node:
            return table
    return None


def _is_laid_on_a_pile(node: ast.Attribute, parents: dict[int, ast.AST]) -> bool:
    """`self.spare[line.to].append(line)`"""
    way = parents.get(id(parents.get(id(node))))
    match way, parents.get(id(way)):
        case ast.Attribute(attr=put), ast.Call(args=[thing]) if put in PUTTING:
            return ast.unparse(thing) == ast.unparse(node.value)
    return False


def _looked_into_by_others(pool: Class, table: str, field: str, passing: Set[int]) -> bool:
    """In any other way than under the number of one that is there, `passing` apart."""
    found = [node for node in walk(pool.node) if id(node) not in passing]
    keys = [key for node in found if (key := _key_into(node, table)) is not None]
    own = pool.text.count(f".{table}")
    elsewhere = pool.module.text.count(f".{table}") > own
    return elsewhere or not all(isinstance(key, ast.Attribute) and key.attr == field for key in keys)


def _key_into(node: ast.AST, table: str) -> ast.expr | None:
    match node:
        case ast.Subscript(value=ast.Attribute(attr=name), slice=key) if name == table:
            return key
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr=asked), args=[key, *_]) if (
            name == table and asked in LOOKING_UP
        ):
            return key
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute(attr=name)]) if (
            name == table
        ):
            return key
    return None

"""Lists that a method has from a table of its object: `pages = self.spare.setdefault(key, [])`, and
`pages.append(pool.take())`. What is put into such a list lies in the table; so does what is put into a table
of one of its records: `nics = self.machines[name].nics`, `nics[network] = pool.take()`, and
`session = self.connect(name)`, which hands out an entry of `self.sessions`; or into a field of one,
`job = self.jobs.setdefault(key, Job(key))`, `job.slot = pool.take()`."""

import ast
import re
from dataclasses import replace

from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import assignments, given_to, own_attribute, root_of
from auditor.project.code.modules import Function, last_part
from auditor.project.outcome import Outcome


def lying_in_tables(outcome: Outcome) -> Outcome:
    """With the table's path for places that begin with the name of such a list."""
    stored = [(node, _path_by_table(outcome.function, path)) for node, path in outcome.stored]
    return replace(outcome, stored=stored) if stored != outcome.stored else outcome


def _path_by_table(function: Function, path: Path) -> Path:
    of_a_record = len(path) == 2 and path[1].startswith(".") and "setdefault(" in function.text
    if not (of_a_record or ANY_ITEM in path[1:]) or function.owner is None or path[0] in function.parameters:
        return path
    bound = [
        node
        for node in function.nodes
        if isinstance(node, ast.Name) and node.id == path[0] and isinstance(node.ctx, ast.Store)
    ]
    values = list(given_to(function, path[0]))
    if len(bound) != 1 or len(values) != 1:
        return path
    if of_a_record and last_part(getattr(values[0], "func", values[0])) != "setdefault":
        return path  # of one that was there before, other rules say more
    if path[1:] != (ANY_ITEM,) or isinstance(values[0], ast.Attribute):
        return (*_in_a_record(function, values[0], path), *path[1:])
    field = _table_of(values[0], function.owner) or _of_which_it_is_put_back(function, path[0], values[0])
    return (function.owner, f".{field}", ANY_ITEM, ANY_ITEM) if field is not None else path


def _in_a_record(function: Function, value: ast.expr, path: Path) -> Path:
    """Where the name's record lies, or the table of one: its own name where nobody knows."""
    own = function.owner or ""
    match value:
        case ast.Attribute(value=record, attr=field) if path[1] == ANY_ITEM:
            inner: Path = (f".{field}",)
        case _ if path[1].startswith("."):
            record, inner = value, ()
        case _:
            return path[:1]
    table = _table_of(record, own) or _handed_out_by(function, record)
    if table is None or _takes_out(function, f"{own}.{table}"):
        return path[:1]
    return own, f".{table}", ANY_ITEM, *inner


def _takes_out(function: Function, table: str) -> bool:
    """`job = self.waiting[0]`, and `self.waiting.popleft()`: it goes on to somewhere else."""
    written = re.escape(table)
    out = rf"{written}\.(?:pop\w*|remove|discard)\(|heappop\({written}\b|del {written}\[|{written} = "
    return re.search(out, function.text) is not None


def _handed_out_by(function: Function, value: ast.expr) -> str | None:
    """The table of which `self.connect(name)` returns an entry, whatever way it goes."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=own), attr=name)) if own == function.owner:
            helper = function.cls.methods.get(name) if function.cls is not None else None
        case _:
            return None
    if helper is None or helper.owner is None:
        return None
    answers = [node.value for node in helper.statements if isinstance(node, ast.Return)]
    tables = {_table_of(answer, helper.owner) if answer is not None else None for answer in answers}
    return tables.pop() if len(tables) == 1 else None


def _of_which_it_is_put_back(function: Function, name: str, value: ast.expr) -> str | None:
    """`pages = self.spare.get(key, [])`, and `self.spare[key] = pages`, or a part of them."""
    own = function.owner or ""
    match value:
        case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[_, ast.List(elts=[])]):
            field = own_attribute(table, own)
        case _:
            return None
    back = (
        isinstance(to, ast.Subscript) and own_attribute(to.value, own) == field and root_of(given) == name
        for to, given in assignments(function)
    )
    return field if any(back) else None


def _table_of(value: ast.expr, own: str) -> str | None:
    match value:
        case ast.Call(func=ast.Attribute(value=table, attr="setdefault"), args=[_, _]):
            return own_attribute(table, own)
        case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[_]):
            return own_attribute(table, own)
        case ast.Subscript(value=table, slice=key) if not isinstance(key, ast.Slice):
            return own_attribute(table, own)
    return None

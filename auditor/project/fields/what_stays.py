"""Where a record lies that another one is put over, and where it goes."""

import ast
from collections.abc import Set

from auditor.flow.follow import Followed
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, found_in_a_table
from auditor.source.nodes import walk


def in_its_tables(method: Function, place: Path) -> tuple[Path, ...]:
    """Where it is before `job = self.jobs[key]`."""
    table = found_in_a_table(method, place[0])
    own = method.owner or ""
    parts = [node for node in walk(table) if isinstance(node, ast.Attribute)] if table is not None else []
    fields = {own_attribute(node, own) for node in parts}
    tables = tuple((own, f".{field}", ANY_ITEM, *place[1:]) for field in sorted(filter(None, fields)))
    return tables or (place,)


def goes_elsewhere(method: Function, followed: Followed, tables: Set[Path]) -> bool:
    """`self.former.append(job.draft)`: another table of the own object has what goes."""
    kept = (path for _, path in followed.endings.beside)
    return any(path[0] == method.owner and path[:2] not in tables for path in kept)


def carries_on(filling: Filling) -> bool:
    """`draft.pages = draft.pages + more`: what is there is in the new one."""
    value = getattr(filling.statement, "value", None)
    parts = walk(value) if isinstance(value, ast.AST) else ()
    return any(
        isinstance(node, ast.Attribute) and own_attribute(node, filling.owner) == filling.field
        for node in parts
    )

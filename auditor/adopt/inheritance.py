"""The mixin as first base of a class, and the import that brings it."""

import ast
from collections.abc import Sequence

from auditor.adopt.draft import Draft, Refused

MIXIN = "MemoryPoolMixin"
STANDARD = "reference_modules.mixin"


def based(draft: Draft, owner: str) -> Draft:
    """`class C(Base)` as `class C(MemoryPoolMixin, Base)`."""
    node = draft.class_named(owner)
    if not node.bases:
        raise Refused("it has no base")
    first = draft.start(node.bases[0])
    own_line = not draft.lines[first[0] - 1][: first[1]].strip()
    glue = f",\n{draft.indent(first[0])}" if own_line else ", "
    return draft.replaced((first, first, MIXIN + glue))


def imported(draft: Draft, module: str) -> Draft:
    """`from module import MemoryPoolMixin` after the imports that the file begins with."""
    if _is_imported(draft):
        return draft
    statement = f"from {module} import {MIXIN}"
    imports = _imports(draft)
    if imports:
        before, last = _next_in_order(imports, module), imports[-1]
        if not draft.alone(last):
            where = f"{draft.path}:{last.lineno}"
            raise Refused(f"{where} has an import that shares a line with another statement")
        return draft.with_lines(before.lineno if before else draft.end(last)[0] + 1, [statement])
    body = draft.tree.body
    at = 1 if _is_docstring(body[0]) and len(body) > 1 else 0
    first = body[at]
    row = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))])
    return draft.with_lines(row, [statement, "", ""])


def _is_imported(draft: Draft) -> bool:
    """Whether the file has a name for the mixin already, be it by import or because it defines it."""
    for node in draft.tree.body:
        match node:
            case ast.ImportFrom(names=names) if any((each.asname or each.name) == MIXIN for each in names):
                return True
            case ast.ClassDef(name=name) if name == MIXIN:
                return True
    return False


def _imports(draft: Draft) -> list[ast.Import | ast.ImportFrom]:
    """The imports of the file itself before its first definition."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in draft.tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            break
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
    return found


def _next_in_order(imports: Sequence[ast.Import | ast.ImportFrom], module: str) -> ast.ImportFrom | None:
    """The import before which a sorted file would have ours: of its kind, beside torch's."""
    rows = [each.lineno for each in imports if _of_torch(each)]
    for each in imports:
        if isinstance(each, ast.ImportFrom) and not module.startswith(".") and each.level == 0:
            near = any(_in_one_group(imports, row, each.lineno) for row in rows)
            if near and (each.module or "") > module and each.module != "__future__":
                return each
    return None


def _in_one_group(imports: Sequence[ast.Import | ast.ImportFrom], one: int, other: int) -> bool:
    """Whether every line between two imports is an import's too."""
    covered = {row for each in imports for row in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    return all(row in covered for row in range(min(one, other), max(one, other) + 1))


def _of_torch(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] == "torch"
    return any(each.name.partition(".")[0] == "torch" for each in node.names)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )

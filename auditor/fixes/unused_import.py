"""The name that nobody uses taken out of its import; the whole statement, where it was the only one."""

import ast

from auditor.case import Case, Parsed
from auditor.fixes.life import block_of
from auditor.fixes.lines import whole
from auditor.fixes.try_finally import is_whole
from auditor.model import Edit, FixOffer, Safety, Span


def without_import(case: Case) -> FixOffer | None:
    """Unsafe: importing a module runs it, and somebody may import the name from here."""
    file = case.file
    found = _alias(file, case) if file else None
    if file is None or found is None:
        return None
    statement, alias = found
    edit = (
        _without_statement(file, statement) if len(statement.names) == 1 else _without(file, statement, alias)
    )
    if edit is None:
        return None
    return FixOffer(Safety.UNSAFE, f"the import of `{case.finding.symbol}` is deleted", (edit,))


def _alias(file: Parsed, case: Case) -> tuple[ast.Import | ast.ImportFrom, ast.alias] | None:
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno == case.finding.span.line:
            for alias in node.names:
                bound = alias.asname or alias.name
                if bound == case.finding.symbol or bound.partition(".")[0] == case.finding.symbol:
                    return node, alias
    return None


def _without_statement(file: Parsed, statement: ast.stmt) -> Edit | None:
    if not is_whole(file, statement):
        return None
    if len(block_of(file, statement)) == 1:
        span = file.span(statement)
        return Edit(span, "pass")
    return whole(file, statement, with_blank_lines=True)


def _without(file: Parsed, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> Edit:
    """The alias and its comma: up to the next alias, or from the end of the one before."""
    index = statement.names.index(alias)
    here = file.span(alias)
    line = file.lines[here.line - 1]
    alone = not line[: here.column - 1].strip() and line[here.end_column - 1 :].strip() in (",", "")
    if alone and here.line == here.end_line and line[here.end_column - 1 :].strip() == ",":
        return Edit(Span(file.path, here.line, 1, here.line + 1, 1), "")
    if index + 1 < len(statement.names):
        after = file.span(statement.names[index + 1])
        return Edit(Span(file.path, here.line, here.column, after.line, after.column), "")
    before = file.span(statement.names[index - 1])
    return Edit(Span(file.path, before.end_line, before.end_column, here.end_line, here.end_column), "")

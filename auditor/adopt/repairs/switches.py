"""The switch: handed on to children (PA304), off by default (PA402)."""

import ast

from auditor.adopt.constructor import with_keywords
from auditor.adopt.draft import Refused
from auditor.adopt.repairs.offer import call_at, draft_of, offered
from auditor.case import Case
from auditor.facts import PooledClass
from auditor.model import FixOffer


def handed_on(case: Case) -> FixOffer | None:
    """Every pooled child that the class builds gets its switch; all of them, or none."""
    found = _class_of(case)
    if found is None or case.file is None or found.entry.switch is None:
        return None
    try:
        draft = draft_of(case.file)
        for child in sorted(found.children, key=lambda each: each.span, reverse=True):
            call = call_at(draft, child.span.line, child.span.column)
            if call is None:
                return None
            draft = with_keywords(draft, call, [f"{child.switch}={found.entry.switch}"])
    except Refused:
        return None
    count = len(found.children)
    what = (
        f"`{found.entry.switch}` handed on to {f'{count} children' if count > 1 else found.children[0].name}"
    )
    return offered([(case.file, draft)], what)


def off_by_default(case: Case) -> FixOffer | None:
    """`= True` becomes `= False`, in the signature or among a dataclass's fields."""
    file, span = case.file, case.finding.span
    if file is None:
        return None
    for node in ast.walk(file.tree):
        value = _default_at(node, span.line, span.column - 1)
        if value is not None:
            try:
                draft = draft_of(file)
                changed = draft.replaced((draft.start(value), draft.end(value), "False"))
            except Refused:
                return None
            return offered([(file, changed)], "the pool off unless it is asked for")
    return None


def _default_at(node: ast.AST, line: int, column: int) -> ast.Constant | None:
    """The True that is the default of the parameter or field that stands there."""
    values: list[tuple[ast.AST, ast.expr | None]] = []
    if isinstance(node, ast.AnnAssign):
        values = [(node.target, node.value)]
    elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
        args = node.args
        positional = [*args.posonlyargs, *args.args]
        values = [*zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True)]
        values += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    for owner, value in values:
        at = getattr(owner, "lineno", 0), getattr(owner, "col_offset", -1)
        if at == (line, column) and isinstance(value, ast.Constant) and value.value is True:
            return value
    return None


def _class_of(case: Case) -> PooledClass | None:
    """The pooled class that the finding is about."""
    span, symbol = case.finding.span, case.finding.symbol
    fits = (each for each in case.facts.pooled if (each.entry.span, each.entry.qualname) == (span, symbol))
    return next(fits, None)

"""The missing half of a class's support (PA303), and a cleanup beside `__del__` (PA404)."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.repairs.offer import draft_of, offered
from auditor.case import Case
from auditor.facts import Lease, PooledClass, outside_of_wrappers
from auditor.fixes.fields import released_by_cleanup
from auditor.fixes.try_finally import bounded
from auditor.model import FixOffer, Safety

_CLOSING = frozenset(("close", "__exit__", "__enter__"))


def completed(case: Case) -> FixOffer | None:
    """The release that the class lacks: around the life of a local lease, or in a cleanup for a field's."""
    for found in case.facts.pooled:
        if (found.entry.span, found.entry.qualname) != (case.finding.span, case.finding.symbol):
            continue
        for lease in _unfinished(found):
            if (offer := _released(case, lease)) is not None:
                return replace(offer, safety=Safety.UNSAFE)
    return None


def _unfinished(found: PooledClass) -> Iterator[Lease]:
    own = {call.span for call in outside_of_wrappers(found.calls)}
    for lease in found.leases:
        if lease.span in own and (lease.leaks or lease.fields):
            yield lease


def _released(case: Case, lease: Lease) -> FixOffer | None:
    fields = tuple(replace(each, released_by=()) for each in lease.fields)
    seen = replace(lease, fields=fields)
    leases = tuple(seen if each == lease else each for each in case.facts.leases)
    about = replace(case.finding, span=lease.span, symbol=lease.symbol)
    one = Case(about, replace(case.facts, leases=leases), case.sources)
    return released_by_cleanup(one) if lease.fields else bounded(one)


def closed(case: Case) -> FixOffer | None:
    """A `close` that does what `__del__` did, once; `__del__` calls it, and `with` does."""
    file = case.file
    if file is None:
        return None
    try:
        draft = draft_of(file)
        owner = draft.class_named(case.finding.symbol)
        methods = {each.name: each for each in owner.body if isinstance(each, ast.FunctionDef)}
        if owner.bases or _CLOSING & methods.keys() or "__del__" not in methods:
            return None
        after = _with_close(draft, methods["__del__"])
    except Refused:
        return None
    return offered([(file, after)], "a `close` that gives back, called by `__del__` and by `with`")


def _with_close(draft: Draft, finaliser: ast.FunctionDef) -> Draft:
    """Each release of a field is made once: the field is None afterwards."""
    if finaliser.decorator_list or len(finaliser.args.args) != 1:
        raise Refused("its `__del__` is no plain method")
    me = finaliser.args.args[0].arg
    indent = draft.indent(finaliser.lineno)
    inner = draft.indent(finaliser.body[0].lineno)
    unit = inner.removeprefix(indent)
    rows = [f"{indent}def close({me}):", f'{inner}"""Give back what this object still holds."""']
    for statement in finaliser.body:
        field = _released_field(statement, me)
        if field is None or not draft.alone(statement) or statement.lineno == finaliser.lineno:
            raise Refused("its `__del__` does more than give back fields")
        name = f"{me}.{field}"
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        rows.append(f"{inner}if {name} is not None:")
        rows += [unit + row for row in draft.lines[first - 1 : last]]
        rows.append(f"{inner}{unit}{name} = None")
    rows += [
        "",
        f"{indent}def __enter__({me}):",
        f"{inner}return {me}",
        "",
        f"{indent}def __exit__({me}, *error):",
        f"{inner}{me}.close()",
        "",
        f"{indent}def __del__({me}):",
        f"{inner}{me}.close()",
    ]
    first, last = finaliser.lineno, finaliser.end_lineno or finaliser.lineno
    return Draft(draft.path, (*draft.lines[: first - 1], *rows, *draft.lines[last:]))


def _released_field(statement: ast.stmt, me: str) -> str | None:
    """`x` of `self.pool.deallocate(self.x)`."""
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(), args=[ast.Attribute(value=ast.Name(id=name), attr=field)], keywords=[]
            )
        ) if name == me:
            return field
    return None

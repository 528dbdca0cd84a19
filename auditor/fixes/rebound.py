"""A lease whose only name gets another meaning: given back all the same, by the pool's `with` or by a second
name."""

import ast
from collections.abc import Sequence

from auditor.case import Case
from auditor.facts import Leak, Loss
from auditor.fixes.escape import Carriers
from auditor.fixes.life import LOOPS, Life, called_by, life_of, mentions, new_name, statements_in
from auditor.fixes.lines import above, below, indentation, whole
from auditor.fixes.region import Region, is_pure
from auditor.fixes.try_finally import guarded, lent, stands_alone
from auditor.model import FixOffer, Safety


def kept_by_name(case: Case) -> FixOffer | None:
    """`out = out / n`, `del out`: the lease released as well."""
    life = life_of(case)
    if life is None or life.lease.handed_over or life.releases:
        return None
    leak = next((each for each in life.lease.leaks if each.loss in (Loss.REBOUND, Loss.DELETED)), None)
    statement = _statement(life, leak) if leak else None
    if statement is None or not stands_alone(life, statement):
        return None
    if isinstance(statement, ast.Delete):
        return _before(life, statement)
    return _bounded(life, statement) or _renamed(life, statement)


def _statement(life: Life, leak: Leak) -> ast.stmt | None:
    """The statement that binds or deletes the name, if it runs once for each acquire."""
    for statement in life.block[life.index + 1 :]:
        for each in statements_in([statement]):
            if each.lineno == leak.at.line and life.binds(each):
                once = not isinstance(statement, LOOPS) or each is statement
                return each if once and isinstance(each, (ast.Assign, ast.Delete, ast.AnnAssign)) else None
    return None


def _before(life: Life, statement: ast.stmt) -> FixOffer:
    """The release in front of the `del`."""
    assert life.lease.giving_back is not None
    margin = indentation(life.file.lines[statement.lineno - 1])
    edit = above(life.file, statement, [margin + life.lease.giving_back.call.format(life.holder)])
    description = f"release of `{life.holder}` before its name is deleted"
    return FixOffer(_safety(life, statement), description, (edit,))


def _bounded(life: Life, statement: ast.stmt) -> FixOffer | None:
    """The pool's `with`, which remembers the lease, or try/finally with a second name for it."""
    if statement not in life.block:
        return None
    end = list(life.block).index(statement) + 1
    second = new_name(f"{life.holder}_lease", life.function)
    region = Region(life, life.block, life.block[life.index + 1 : end], None, alias=second)
    found = lent(region) or guarded(region)
    wrong = _wrong_releases(life, life.block[end:])
    moved = (*wrong, life.statement, *region.body)
    if found is None or any(not stands_alone(life, each) for each in moved):
        return None
    edit, how = found
    edits = (edit, *(whole(life.file, each) for each in wrong))
    return FixOffer(_safety(life, statement), f"{how} around the life of the first `{life.holder}`", edits)


def _renamed(life: Life, statement: ast.stmt) -> FixOffer | None:
    """A second name for the lease, released where the first is bound to something else."""
    way = life.lease.giving_back
    wrong = _wrong_releases(life, life.block[life.index + 1 :])
    if way is None or any(not stands_alone(life, each) for each in wrong):
        return None
    second = new_name(f"{life.holder}_lease", life.function)
    margin = indentation(life.file.lines[statement.lineno - 1])
    edits = (
        above(life.file, statement, [f"{margin}{second} = {life.holder}"]),
        below(life.file, statement, [margin + way.call.format(second)]),
        *(whole(life.file, each) for each in wrong),
    )
    description = f"a second name for the lease in `{life.holder}`, and its release"
    return FixOffer(_safety(life, statement), description, edits)


def _wrong_releases(life: Life, later: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements that give back what the name means by then, which no pool has handed out."""
    receiver = ast.unparse(life.call.func.value) if isinstance(life.call.func, ast.Attribute) else ""
    found = []
    for each in statements_in(later):
        call = called_by(each)
        if call is None or not isinstance(call.func, ast.Attribute) or not is_pure(each, life.holder):
            continue
        if ast.unparse(call.func.value) in (receiver, life.holder):
            found.append(each)
    return found


def _safety(life: Life, statement: ast.stmt) -> Safety:
    """Safe: nothing made of the lease shares its memory and is still there when its name is not."""
    assert life.lease.giving_back is not None
    until = [each for each in life.block[life.index + 1 :] if each.lineno <= statement.lineno]
    carriers = Carriers(life.holder, life.lease.value, until)
    others = carriers.names - {life.holder}
    later = [each for each in life.function.body if (each.end_lineno or 0) > statement.lineno]
    value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
    shared = value is not None and carriers.carries(value)
    shared = shared or carriers.may_outlive or any(mentions(each, others) for each in later)
    return Safety.SAFE if life.lease.giving_back.certain and not shared else Safety.UNSAFE

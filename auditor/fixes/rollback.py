"""A lease that is handed over later: given back if something before that raises."""

import ast
from collections.abc import Sequence

from auditor.case import Case
from auditor.fixes.exits import always_holds, own_nodes, release_before, was_asked
from auditor.fixes.life import (
    EXITS,
    SCOPES,
    Life,
    block_of,
    called_by,
    life_of,
    mentions,
    statements_in,
    turns_back_if_none,
)
from auditor.fixes.lines import indentation, indented, newline_of, taken
from auditor.fixes.origins import Origins, by_block, innermost, origins_of, stretch
from auditor.fixes.region import is_pure, region_start
from auditor.fixes.try_finally import first_line, giving_back, is_whole, unit_of
from auditor.model import Edit, FixOffer, Safety, Span

CALLING = (ast.Call, ast.Await, ast.Raise, ast.Assert)
"""What the analysis believes to raise."""

ASKING = frozenset({"isinstance", "len", "type", "id", "bool", "repr"})
"""Functions that keep nothing of what they are given."""


def rolled_back(case: Case) -> FixOffer | None:
    """`except BaseException:` with the release, around the statements whose exceptions lose the lease.

    Each stretch of checks by itself, where only its own `raise` and `assert` count; everything up to the last
    call that matters, where a handler further out would swallow the exception and forget the lease, and where
    what gives it back is a call that does more than that.
    """
    life = life_of(case, several=True)
    if life is None or life.releases is None:
        return None
    origins = origins_of(life.lease.leaks, calls=not life.lease.handed_over)
    if origins is None or not (life.lease.handed_over or origins.caught or _working_releases(life)):
        return None
    stretches = _stretches(life, origins)
    edits = [rollback(life, body, origins) for body in stretches]
    kept = tuple(edit for edit in edits if edit is not None)
    if not kept or len(kept) < len(edits):
        return None
    return FixOffer(_safety(life, origins), _described(life, stretches), kept)


def _safety(life: Life, origins: Origins) -> Safety:
    way = life.lease.giving_back
    plain = way is not None and way.certain and not way.each
    return Safety.SAFE if plain and not origins.caught and not life.releases else Safety.UNSAFE


def _described(life: Life, stretches: Sequence[Sequence[ast.stmt]]) -> str:
    first, last = stretches[0][0].lineno, stretches[-1][-1].end_lineno or stretches[-1][-1].lineno
    what = f"what `{life.holder}` holds" if life.is_several else f"`{life.holder}`"
    if first == last:
        return f"release of {what} if line {first} raises"
    return f"release of {what} if lines {first} to {last} raise"


def _stretches(life: Life, origins: Origins) -> list[list[ast.stmt]]:
    """The statements to stand around, one list for each `try`; none where they cannot be told."""
    if origins.caught:
        body = _until_handed_on(life, origins)
        return [body] if body else []
    if not life.lease.handed_over:
        body = _until_released(life, origins)
        return [body] if body else []
    found = [innermost(life, line) for line in origins.lines]
    known = [each for each in found if each is not None and always_holds(life, each)]
    if len(known) < len(found):
        return []
    return list(by_block(life, [check for each in known for check in _checks_around(life, each)]))


def _until_handed_on(life: Life, origins: Origins) -> list[ast.stmt]:
    """From the first call after the acquire to the last statement before the lease is somebody else's."""
    start = region_start(life)
    later = list(start[0][start[1] :]) if start else []
    known = stretch(later, origins.lines)
    if not known:
        return []
    sure = later.index(known[-1]) + 1
    handed = (index for index, each in enumerate(later) if any(_gives(life, e, origins) for e in _all(each)))
    body = later[: max(sure, next(handed, len(later)))]
    return from_first_call(body)


def _working_releases(life: Life) -> list[ast.stmt]:
    """Calls that do more with the lease than to give it back (`store.put(x)`)."""
    return [each for each in life.releases or () if not is_pure(each, life.holder)]


def _until_released(life: Life, origins: Origins) -> list[ast.stmt]:
    """From the first statement that loses the lease to the one before such a release; none where an exception
    loses it elsewhere."""
    start = region_start(life)
    later = list(start[0][start[1] :]) if start else []
    working = _working_releases(life)
    end = next((index for index, each in enumerate(later) if each in working), 0)
    held = later[:end]
    if not all(stretch(held, [line]) for line in origins.lines):
        return []
    return held[held.index(stretch(held, origins.lines)[0]) :]


def from_first_call(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Without the statements at the beginning that cannot raise."""
    raising = (
        index for index, each in enumerate(body) if any(isinstance(n, CALLING) for n in ast.walk(each))
    )
    return list(body[next(raising, len(body)) :])


def _all(statement: ast.stmt) -> list[ast.stmt]:
    return list(statements_in([statement]))


def _gives(life: Life, statement: ast.stmt, origins: Origins) -> bool:
    returned = isinstance(statement, ast.Return) and statement.value is not None
    return _hands_on(life, statement, origins) or (returned and life.mentions(statement))


def _checks_around(life: Life, statement: ast.stmt) -> list[ast.stmt]:
    """Assertions in a row: with one of them guarded, the lease would be lost by the next."""
    block = list(block_of(life.file, statement))
    first = last = block.index(statement)
    while first > 0 and _is_check(life, block[first - 1]):
        first -= 1
    while last + 1 < len(block) and _is_check(life, block[last + 1]):
        last += 1
    return block[first : last + 1] if _is_check(life, statement) else [statement]


def _is_check(life: Life, statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assert)
        and statement.lineno > life.statement.lineno
        and not turns_back_if_none(statement, life.holder)
    )


def rollback(life: Life, body: list[ast.stmt], origins: Origins) -> Edit | None:
    """The edit for one stretch; None where the lease may be somebody else's within it."""
    if len(body) == 1 and isinstance(body[0], ast.Raise):
        return release_before(life, body[0])
    inner = list(statements_in(body))
    if life.statement in inner or not all(is_whole(life.file, each) for each in body):
        return None
    if any(_hands_on(life, each, origins) or _binds_anew(life, each) for each in inner):
        return None
    if not all(_is_last_act(life, each) for each in inner if each in (life.releases or ())):
        return None
    return _around(life, body)


def _hands_on(life: Life, statement: ast.stmt, origins: Origins) -> bool:
    """Whether the statement may make the lease somebody else's; the analysis knows better of an origin."""
    if isinstance(statement, SCOPES):
        return mentions(statement, {life.holder})
    for node in own_nodes(statement):
        match node:
            case ast.Call(args=args, keywords=keywords) if node.lineno not in origins.lines:
                given = [*args, *(keyword.value for keyword in keywords)]
                if any(_is_it(value, life.holder) for value in given) and not _only_asks(node):
                    return statement not in (life.releases or ())
            case ast.Yield(value=ast.expr() as value) | ast.YieldFrom(value=value):
                if mentions(value, {life.holder}):
                    return True
    match statement:
        case ast.Assign(targets=targets, value=value) if mentions(value, {life.holder}):
            return any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)
    return False


def _is_it(value: ast.expr, holder: str) -> bool:
    """Whether a call is given the lease itself, or something that has it within."""
    if isinstance(value, ast.Attribute | ast.Subscript | ast.Compare):
        return False
    return mentions(value, {holder})


def _only_asks(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in (
        "isinstance",
        "len",
        "type",
        "id",
        "bool",
        "repr",
    )


def _binds_anew(life: Life, statement: ast.stmt) -> bool:
    """Whether the holder gets another meaning; `x = reshape(x)` is still what is owed back."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if not any(target is not None and life.binds(target) for target in targets):
        return isinstance(statement, ast.Delete) and life.mentions(statement)
    return not (isinstance(statement, ast.Assign) and life.mentions(statement.value))


def _is_last_act(life: Life, release: ast.stmt) -> bool:
    """Whether a release within the stretch is followed by an exit, and by nothing that could raise."""
    block = list(block_of(life.file, release))
    after = [each for each in block[block.index(release) + 1 :] if not _only_notes(each)]
    if len(after) != 1 or not isinstance(after[0], EXITS) or isinstance(after[0], ast.Raise):
        return False
    return is_pure(release, life.holder) and not any(isinstance(n, ast.Call) for n in own_nodes(after[0]))


def _only_notes(statement: ast.stmt) -> bool:
    """`results.append(None)`, of a local list: nothing in it can fail."""
    match called_by(statement):
        case ast.Call(
            func=ast.Attribute(value=ast.Name(), attr="append"), args=[ast.Constant()], keywords=[]
        ):
            return True
    return False


def _end_before(life: Life, statement: ast.stmt) -> int:
    """The last line of what stands before `statement`: its neighbour, or the head of the block."""
    block = list(block_of(life.file, statement))
    index = block.index(statement)
    if index:
        return block[index - 1].end_lineno or block[index - 1].lineno
    return getattr(life.file.parents[statement], "lineno", 0)


def _around(life: Life, body: list[ast.stmt]) -> Edit | None:
    file = life.file
    first, last = (
        first_line(file, body[0], _end_before(life, body[0])),
        body[-1].end_lineno or body[-1].lineno,
    )
    unit, newline = unit_of(life), newline_of(file)
    deeper = indented(taken(file, first, last), unit)
    if deeper is None:
        return None
    margin = indentation(file.lines[body[0].lineno - 1])
    release = giving_back(life, margin + unit, unit, asked=was_asked(life, body[0]))
    text = [f"{margin}try:", "".join(deeper).rstrip("\r\n"), f"{margin}except BaseException:", *release]
    return Edit(
        Span(file.path, first, 1, last, len(file.lines[last - 1]) + 1),
        newline.join([*text, f"{margin}{unit}raise"]),
    )

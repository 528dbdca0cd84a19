"""A lease that is handed over later: given back if something before that raises."""

import ast
from collections.abc import Sequence

from auditor.case import Case
from auditor.fixes.exits import always_holds, own_nodes, release_before, was_asked
from auditor.fixes.life import EXITS, SCOPES, Life, block_of, life_of, mentions, statements_in
from auditor.fixes.lines import indentation, indented, newline_of, taken
from auditor.fixes.origins import Origins, by_block, innermost, origins_of, stretch
from auditor.fixes.region import is_pure, region_start
from auditor.fixes.try_finally import giving_back, is_whole, unit_of
from auditor.model import Edit, FixOffer, Safety, Span

ASKING = frozenset({"isinstance", "len", "type", "id", "bool", "repr"})
"""Functions that keep nothing of what they are given."""


def rolled_back(case: Case) -> FixOffer | None:
    """`except BaseException:` with the release, around the statements whose exceptions lose the lease.

    Each stretch of checks by itself, where only its own `raise` and `assert` count; everything up to the last
    call that matters, where a handler further out would swallow the exception and forget the lease.
    """
    life = life_of(case, several=True)
    if life is None or not life.lease.handed_over or life.releases is None:
        return None
    origins = origins_of(life.lease.leaks)
    stretches = _stretches(life, origins) if origins else []
    edits = [_rollback(life, body, origins) for body in stretches if origins]
    kept = tuple(edit for edit in edits if edit is not None)
    if origins is None or not kept or len(kept) < len(edits):
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
        start = region_start(life)
        body = stretch(start[0][start[1] :], origins.lines) if start else []
        return [body] if body else []
    found = [innermost(life, line) for line in origins.lines]
    known = [each for each in found if each is not None and always_holds(life, each)]
    return list(by_block(life, known)) if len(known) == len(found) else []


def _rollback(life: Life, body: list[ast.stmt], origins: Origins) -> Edit | None:
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
    after = block[block.index(release) + 1 :]
    if len(after) != 1 or not isinstance(after[0], EXITS) or isinstance(after[0], ast.Raise):
        return False
    return is_pure(release, life.holder) and not any(isinstance(n, ast.Call) for n in own_nodes(after[0]))


def _around(life: Life, body: list[ast.stmt]) -> Edit | None:
    file = life.file
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    unit, newline = unit_of(life), newline_of(file)
    deeper = indented(taken(file, first, last), unit)
    if deeper is None:
        return None
    margin = indentation(file.lines[first - 1])
    release = giving_back(life, margin + unit, unit, asked=was_asked(life, body[0]))
    text = [f"{margin}try:", "".join(deeper).rstrip("\r\n"), f"{margin}except BaseException:", *release]
    return Edit(
        Span(file.path, first, 1, last, len(file.lines[last - 1]) + 1),
        newline.join([*text, f"{margin}{unit}raise"]),
    )

"""Leases that trade their names and are given back one after the other: one `finally` for all of them."""

import ast
from collections.abc import Sequence

from auditor.case import Case
from auditor.fixes.exits import own_nodes
from auditor.fixes.life import EXITS, Life, called_by, leaves, life_of, statements_in
from auditor.fixes.lines import indentation, indented, newline_of, taken
from auditor.fixes.region import is_pure
from auditor.fixes.try_finally import comments_above, first_line, stands_alone, unit_of
from auditor.model import Edit, FixOffer, Safety, Span


def released_together(case: Case) -> FixOffer | None:
    """`front, back = back, front`: whoever holds which buffer by then, the `finally` gives back both."""
    life = life_of(case)
    releases = life.releases if life is not None else None
    if life is None or not releases or len(releases) < 2:
        return None
    names = _names_released(life, releases)
    if life.holder not in names or len(names) != len(releases):
        return None
    body = list(life.block[life.index + 1 : list(life.block).index(releases[0])])
    if not body or not all(stands_alone(life, each) for each in [life.statement, *body, *releases]):
        return None
    if not _only_trade(life, body, set(names)) or _is_left(body):
        return None
    edit = _around(life, body, releases, names)
    safety = Safety.UNSAFE if life.lease.handed_over else Safety.SAFE
    listed = " and ".join(f"`{name}`" for name in names)
    return FixOffer(safety, f"try/finally around the life of {listed}", (edit,)) if edit else None


def _names_released(life: Life, releases: Sequence[ast.stmt]) -> list[str]:
    """What each of the releases gives back, if they stand in a row in the block of the acquire."""
    block = list(life.block)
    if any(each not in block for each in releases):
        return []
    places = [block.index(each) for each in releases]
    if places != list(range(places[0], places[0] + len(places))):
        return []
    found = [_name_released(each) for each in releases]
    return [name for name in found if name] if len(set(found)) == len(found) else []


def _name_released(release: ast.stmt) -> str:
    call = called_by(release)
    nodes = ast.walk(call) if call is not None else iter(())
    names = [node.id for node in nodes if isinstance(node, ast.Name) and is_pure(release, node.id)]
    receiver = call.func.value if call is not None and isinstance(call.func, ast.Attribute) else None
    if call is not None and not call.args and not call.keywords and isinstance(receiver, ast.Name):
        return receiver.id
    return names[-1] if names else ""


def _only_trade(life: Life, body: Sequence[ast.stmt], names: set[str]) -> bool:
    """Whether each other name is bound once, in this block, and then they only change places."""
    others = dict.fromkeys(names - {life.holder}, 0)
    for statement in statements_in(body):
        bound = _bound(statement) & names
        if not bound:
            continue
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if name in others and statement in body:
                others[name] += 1
            case ast.Assign(targets=[ast.Tuple() as target], value=ast.Tuple() as value) if _same(
                target, value
            ):
                pass
            case _:
                return False
    return bool(others) and all(count == 1 for count in others.values())


def _bound(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in own_nodes(statement)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def _same(target: ast.Tuple, value: ast.Tuple) -> bool:
    """Whether both sides are the same names in another order."""
    sides = [sorted(each.id for each in side.elts if isinstance(each, ast.Name)) for side in (target, value)]
    return sides[0] == sides[1] and len(set(sides[0])) == len(target.elts) == len(value.elts)


def _is_left(body: Sequence[ast.stmt]) -> bool:
    return any(
        isinstance(each, EXITS) and not isinstance(each, ast.Raise) and leaves(each, body)
        for each in statements_in(body)
    )


def _around(
    life: Life, body: list[ast.stmt], releases: Sequence[ast.stmt], names: Sequence[str]
) -> Edit | None:
    file, newline, unit = life.file, newline_of(life.file), unit_of(life)
    first = first_line(file, body[0], life.statement.end_lineno or life.statement.lineno)
    until, last = body[-1].end_lineno or body[-1].lineno, releases[-1].end_lineno or releases[-1].lineno
    deeper = indented(taken(file, first, until), unit)
    if deeper is None:
        return None
    margin = indentation(file.lines[life.statement.lineno - 1])
    absent = [f"{margin}{name} = None" for name in names if name != life.holder]
    comments = [unit + line.rstrip("\r\n") for line in comments_above(file, releases[0], until)]
    lines = [*absent, f"{margin}try:", "".join(deeper).rstrip("\r\n"), f"{margin}finally:", *comments]
    for name, release in zip(names, releases, strict=True):
        inner = margin + unit
        if name != life.holder or life.is_checked:
            lines.append(f"{inner}if {name} is not None:")
            inner += unit
        lines.append(inner + file.source(release))
    end = len(file.lines[last - 1]) + 1
    return Edit(Span(file.path, first, 1, last, end), newline.join(lines))

"""A lease that is handed over later: given back if a check before that raises."""

import ast

from auditor.case import Case
from auditor.facts import Loss
from auditor.fixes.exits import gives_away
from auditor.fixes.life import Life, life_of, statements_in
from auditor.fixes.lines import indentation, indented, newline_of, taken
from auditor.fixes.region import region_start
from auditor.fixes.try_finally import giving_back, is_whole, unit_of
from auditor.model import Edit, FixOffer, Safety, Span


def rolled_back(case: Case) -> FixOffer | None:
    """`except BaseException:` with the release, around the statements whose `raise` or `assert` loses it."""
    life = life_of(case)
    if life is None or not life.lease.handed_over or life.releases != []:
        return None
    start = region_start(life)
    if start is None or start[0] is not life.block:
        return None
    later = list(life.block[start[1] :])
    lines = [leak.at.line for leak in life.lease.leaks if leak.loss is Loss.RAISE]
    places = [
        index
        for index, each in enumerate(later)
        if any(each.lineno <= line <= (each.end_lineno or each.lineno) for line in lines)
    ]
    if not places or len(lines) > len(places):
        return None
    return _around(life, later[places[0] : places[-1] + 1])


def _around(life: Life, body: list[ast.stmt]) -> FixOffer | None:
    file = life.file
    inner = list(statements_in(body))
    if any(gives_away(each, life.holder) or isinstance(each, ast.Return) for each in inner):
        return None
    if any(life.binds(each) or not is_whole(file, each) for each in body):
        return None
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    unit, newline = unit_of(life), newline_of(file)
    deeper = indented(taken(file, first, last), unit)
    if deeper is None:
        return None
    margin = indentation(file.lines[first - 1])
    release = giving_back(life, margin + unit, unit, asked=True)
    text = [f"{margin}try:", "".join(deeper).rstrip("\r\n"), f"{margin}except BaseException:", *release]
    edit = Edit(
        Span(file.path, first, 1, last, len(file.lines[last - 1]) + 1),
        newline.join([*text, f"{margin}{unit}raise"]),
    )
    assert life.lease.giving_back is not None
    safety = Safety.SAFE if life.lease.giving_back.certain else Safety.UNSAFE
    where = f"line {first} raises" if first == last else f"lines {first} to {last} raise"
    return FixOffer(safety, f"release of `{life.holder}` if {where}", (edit,))

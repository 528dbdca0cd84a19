"""Leases that a loop gathers in a list or dict: given back where the function leaves without it."""

import ast
from dataclasses import replace
from functools import partial
from itertools import dropwhile

from auditor.case import Case
from auditor.facts import LEAVING, Leak, Loss
from auditor.fixes.exits import own_nodes
from auditor.fixes.gathering import Gathering, gathering_of, is_handed_on, is_name, is_whole_until
from auditor.fixes.life import block_of, is_only_without, life_of, statements_in
from auditor.fixes.lines import above, indentation, indented, newline_of, split, taken
from auditor.fixes.origins import Origins, innermost, origins_of, stretch
from auditor.fixes.region import region_start
from auditor.fixes.rollback import from_first_call, rollback
from auditor.fixes.try_finally import is_whole, stands_alone, unit_of
from auditor.model import Edit, FixOffer, Safety, Span

NOWHERE = Origins((), caught=True)


def gathered_given_back(case: Case) -> FixOffer | None:
    """A loop that gives them back before each return that leaves the list behind, or when the loop raises."""
    life = life_of(case)
    gathering = gathering_of(life) if life is not None else None
    if life is None or gathering is None:
        return None
    origins = origins_of(life.lease.leaks)
    leaving = [leak for leak in life.lease.leaks if leak.loss in LEAVING]
    what = f"release of what `{gathering.name}` holds"
    if origins is not None and origins.caught:
        edit = _around_until_handed_on(gathering, origins)
        where = f"{what} if something up to its hand-over raises"
        return FixOffer(Safety.UNSAFE, where, (edit,)) if edit else None
    edits = (
        [_before_leaving(gathering, leak) for leak in leaving] if leaving else [_around(gathering, origins)]
    )
    found = tuple(dict.fromkeys(edit for edit in edits if edit is not None))
    if not found or None in edits:
        return None
    where = "before leaving without it" if leaving else "if what fills it or checks it raises"
    return FixOffer(_safety(gathering), f"{what} {where}", found)


def _safety(gathering: Gathering) -> Safety:
    """Safe: the leases go into the container and nowhere else."""
    life = gathering.life
    kept = set(gathering.added.values())
    given = (
        value
        for statement in statements_in([gathering.loop])
        for node in own_nodes(statement)
        if isinstance(node, ast.Call)
        for value in node.args
    )
    elsewhere = any(value not in kept and life.mentions(value) for value in given)
    certain = life.lease.giving_back is not None and life.lease.giving_back.certain
    return Safety.SAFE if certain and not elsewhere and not life.releases else Safety.UNSAFE


def _before_leaving(gathering: Gathering, leak: Leak) -> Edit | None:
    """In front of the `return` of this leak."""
    life = gathering.life
    statement = innermost(life, leak.at.line)
    if not isinstance(statement, ast.Return) or not stands_alone(life, statement):
        return None
    if statement.lineno < gathering.loop.lineno or not is_whole_until(gathering, statement.lineno):
        return None
    if any(is_name(node, gathering.name) for node in ast.walk(statement)):
        return None
    within = statement.lineno <= (gathering.loop.end_lineno or gathering.loop.lineno)
    if within and not _is_listed(leak) and statement.lineno > life.statement.lineno:
        return None  # the lease of this turn is not in the list yet
    margin = indentation(life.file.lines[statement.lineno - 1])
    return above(life.file, statement, gathering.giving_back(margin, unit_of(life)))


def _is_listed(leak: Leak) -> bool:
    return leak.holder.endswith("[*]")


def _around(gathering: Gathering, origins: Origins | None) -> Edit | None:
    """`except BaseException:` around the loop, where its checks lose what earlier turns have gathered, and
    around the checks that come before the list is handed on."""
    life, loop = gathering.life, gathering.loop
    block = list(block_of(life.file, loop))
    body = stretch(block[block.index(loop) :], [loop.lineno, *(origins.lines if origins else ())])
    last, end = body[-1].end_lineno or body[-1].lineno, loop.end_lineno or loop.lineno
    if origins is None or not all(loop.lineno < line <= last for line in origins.lines):
        return None
    inside = [
        leak for leak in life.lease.leaks if leak.loss is Loss.RAISE and not leak.holder.endswith("[*]")
    ]
    if any(life.statement.lineno < leak.at.line <= end for leak in inside):
        return None
    if not all(is_whole(life.file, each) for each in body):
        return None
    if not is_whole_until(gathering, last + 1):
        return None
    return _tried(gathering, last, NOWHERE)


def _around_until_handed_on(gathering: Gathering, origins: Origins) -> Edit | None:
    """The same around everything up to the hand-over, where a handler further out swallows the exception
    and forgets the list. What the analysis saw raise with the leases in hand has only borrowed them; a call
    that was to take them and raises has not taken them."""
    life, loop = gathering.life, gathering.loop
    block = list(block_of(life.file, loop))
    later = block[block.index(loop) :]
    handed = next((each for each in later if is_handed_on(gathering, each, origins.lines)), None)
    if handed is None or handed is loop or life.releases is None:
        return None
    body = later[: later.index(handed) + isinstance(handed, ast.Expr)]
    last = body[-1].end_lineno or body[-1].lineno
    if not all(loop.lineno <= line <= last for line in origins.lines):
        return None
    if not all(is_whole(life.file, each) for each in body):
        return None
    return _tried(replace(gathering, unchecked=not life.is_checked), last, origins)


def _tried(gathering: Gathering, last: int, origins: Origins) -> Edit | None:
    life, first = gathering.life, gathering.loop.lineno
    file, unit, newline = life.file, unit_of(life), newline_of(life.file)
    lines = _with_this_turns(gathering, taken(file, first, last), origins)
    deeper = indented(lines, unit) if lines is not None else None
    if deeper is None:
        return None
    margin = indentation(file.lines[first - 1])
    text = [
        f"{margin}try:",
        "".join(deeper).rstrip("\r\n"),
        f"{margin}except BaseException:",
        *gathering.giving_back(margin + unit, unit),
        f"{margin}{unit}raise",
    ]
    return Edit(Span(file.path, first, 1, last, len(file.lines[last - 1]) + 1), newline.join(text))


def _with_this_turns(gathering: Gathering, lines: list[str], origins: Origins) -> list[str] | None:
    """The lines, with a rollback of what this turn has acquired and not put in yet, if one is due."""
    life = gathering.life
    start = region_start(life)
    adding = next((each for each in gathering.added if _adds_this_turns(gathering, each)), None)
    if start is None or adding is None or adding not in start[0]:
        return None
    block, index = start
    held = dropwhile(partial(is_only_without, holder=life.holder), block[index : list(block).index(adding)])
    between = from_first_call(list(held))
    if not between:
        return lines
    edit = rollback(life, between, Origins(origins.lines, caught=True))
    if edit is None:
        return None
    before, after = edit.span.line - gathering.loop.lineno, edit.span.end_line + 1 - gathering.loop.lineno
    return [*lines[:before], *split(edit.replacement + newline_of(life.file)), *lines[after:]]


def _adds_this_turns(gathering: Gathering, statement: ast.stmt) -> bool:
    later = statement.lineno > gathering.life.statement.lineno
    return later and isinstance(gathering.added[statement], ast.Name)

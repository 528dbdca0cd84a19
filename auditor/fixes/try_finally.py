"""`try:` around a lease's life and its release in the `finally`; `with` where the pool lends."""

import ast
from collections.abc import Sequence

from auditor.case import Case, Parsed
from auditor.fixes.escape import Carriers
from auditor.fixes.life import Life, life_of, new_name
from auditor.fixes.lines import indentation, indented, newline_of, taken, unit_around
from auditor.fixes.region import Region, conditions_hold, is_pure, region_of
from auditor.flow.effects import Value
from auditor.model import Edit, FixOffer, Safety, Span


def bounded(case: Case) -> FixOffer | None:
    """The lease given back however its block is left; None where it is handed over or ends elsewhere."""
    life = life_of(case, several=True)
    region = region_of(life) if life is not None else None
    if region is None or not conditions_hold(region) or not _is_on_own_lines(region):
        return None
    if region.around and region.release is None and region.life.is_told:
        return None  # on the other way it is the caller's
    safety = _safety(region)
    edit = (lent(region) or guarded(region)) if safety is not None else None
    if safety is None or edit is None:
        return None
    replacement, how = edit
    return FixOffer(safety, f"{how} around the life of `{region.life.holder}`", (replacement,))


def _safety(region: Region) -> Safety | None:
    """None where the release might come too early for somebody.

    Safe: what is released was released before, but for exceptions; or nothing of it can be reached then.
    """
    lease, holder = region.life.lease, region.life.holder
    assert lease.giving_back is not None
    ends_alike = region.release is not None and not region.dropped and not region.has_exits
    if lease.handed_over:  # or lost sight of, and then released all the same
        return Safety.UNSAFE if ends_alike else None
    escapes = not ends_alike and Carriers(holder, lease.value, region.body).may_outlive
    if escapes and lease.value is not Value.TENSOR:
        return None
    known = lease.giving_back.certain or bool(region.life.releases)
    return Safety.SAFE if known and not escapes else Safety.UNSAFE


def lent(region: Region) -> tuple[Edit, str] | None:
    """`with pool.lease(...) as x:` where the pool has one, and the body follows the acquire at once."""
    life = region.life
    way, statement = life.lease.giving_back, life.statement
    plain = isinstance(statement, ast.Assign) and statement.value is life.call
    if way is None or way.lending is None or not way.certain or not plain or life.is_checked:
        return None
    if not region.begins_at_once or isinstance(region.release, ast.If):
        return None
    body = _body(region)
    if body is None:
        return None
    file = life.file
    call, callee = file.span(life.call), file.span(life.call.func)
    lines = list(taken(file, call.line, call.end_line))
    tail = lines[-1][call.end_column - 1 :]
    lines[-1] = lines[-1][: call.end_column - 1]
    if callee.end_line != call.line:
        return None
    opening = indentation(lines[0]) + "with " + way.lending + lines[0][callee.end_column - 1 :]
    header = "".join([opening, *lines[1:]]) + f" as {life.holder}:" + tail
    between = taken(file, call.end_line + 1, _first_line(region) - 1)
    text = header + "".join([*between, *body, *_after(region)])
    return _edit(region, life.statement.lineno, text), f"`with {way.lending}(...)`"


def guarded(region: Region) -> tuple[Edit, str] | None:
    """try/finally around the region, and the release in the finally."""
    body = _body(region)
    if body is None:
        return None
    newline = newline_of(region.life.file)
    margin, unit = _margin(region), unit_of(region.life)
    release = _release(region, margin + unit, newline)
    if release is None:
        return None
    text = "".join(
        [
            *_initialised(region, margin, newline),
            f"{margin}try:{newline}",
            *_ended(body, newline),
            f"{margin}finally:{newline}",
            *release,
            *_after(region),
        ]
    )
    return _edit(region, _first_line(region), text), "try/finally"


def _release(region: Region, margin: str, newline: str) -> list[str] | None:
    """What gives the lease back, as it is written there, or in the words of the pool."""
    life = region.life
    if region.alias and life.lease.giving_back is not None:
        return [margin + life.lease.giving_back.call.format(region.alias) + newline]
    if region.release is None or region.around:
        lines = giving_back(life, margin, unit_of(life), asked=region.is_sure, may_lack=region.around)
        return [*_comments(region), *(line + newline for line in lines)]
    lines = _with_comments(region, region.release)
    deeper = indented(lines, unit_of(region.life))
    return _ended(deeper, newline) if deeper is not None else None


def _comments(region: Region) -> list[str]:
    """What is said above the release, one step deeper."""
    if region.release is None:
        return []
    lines = _with_comments(region, region.release)
    above = lines[: len(lines) - 1 - (region.release.end_lineno or 0) + region.release.lineno]
    return [unit_of(region.life) + line if line.strip() else line for line in above]


def _initialised(region: Region, margin: str, newline: str) -> list[str]:
    """`x = None` where the acquire is conditional and no such statement is there yet; or a second name."""
    life = region.life
    if region.alias:
        return [f"{margin}{region.alias} = {life.holder}{newline}"]
    if not region.around:
        return []
    before = region.block[: list(region.block).index(region.body[0])]
    known = any(life.binds(each) and isinstance(each, (ast.Assign, ast.AnnAssign)) for each in before)
    return [] if known else [f"{margin}{life.holder} = None{newline}"]


def giving_back(
    life: Life, margin: str, unit: str, *, asked: bool = False, may_lack: bool = False
) -> list[str]:
    """A release as a statement of its own, asking first where there may be no lease."""
    if asked or not (life.is_checked or may_lack):
        return _releasing(life, margin, unit)
    return [f"{margin}if {life.holder} is not None:", *_releasing(life, margin + unit, unit)]


def _releasing(life: Life, margin: str, unit: str) -> list[str]:
    if not life.is_several:
        return [margin + written_release(life)]
    assert life.lease.giving_back is not None
    each = new_name("lease", life.function)
    release = life.lease.giving_back.call.format(each)
    asking = [f"{margin}{unit}if {each} is not None:", f"{margin}{unit}{unit}{release}"]
    return [f"{margin}for {each} in {life.holder}:", *asking]


def written_release(life: Life) -> str:
    """As the function itself writes it elsewhere, else as the project says."""
    for release in life.releases or ():
        if not is_pure(release, life.holder):
            continue
        text = life.file.source(release)
        if "\n" not in text:
            return text
    assert life.lease.giving_back is not None
    return life.lease.giving_back.call.format(life.holder)


def _body(region: Region) -> list[str] | None:
    """The body's lines one step deeper, without the releases that it no longer needs."""
    file = region.life.file
    first, last = _first_line(region), _end_of(region.body)
    superfluous = {
        number
        for statement in region.dropped
        for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }
    numbered = zip(range(first, last + 1), taken(file, first, last), strict=True)
    return indented(
        [line for number, line in numbered if number not in superfluous],
        unit_of(region.life),
    )


def _after(region: Region) -> list[str]:
    """Releases of other leases, which come after ours now."""
    file = region.life.file
    return [
        line for each in region.after for line in taken(file, each.lineno, each.end_lineno or each.lineno)
    ]


def _edit(region: Region, first: int, text: str) -> Edit:
    """Everything from line `first` to the end of the life, replaced."""
    ends = [region.body[-1], *region.after, *([region.release] if region.release else [])]
    last = _end_of(ends)
    file = region.life.file
    return Edit(Span(file.path, first, 1, last, len(file.lines[last - 1]) + 1), text.rstrip("\r\n"))


def _end_of(statements: Sequence[ast.stmt]) -> int:
    return max(statement.end_lineno or statement.lineno for statement in statements)


def _first_line(region: Region) -> int:
    """Where the body begins, comments directly above its first statement included."""
    return first_line(region.life.file, region.body[0], _end_before(region, region.body[0]))


def first_line(file: Parsed, statement: ast.stmt, limit: int) -> int:
    """Where a statement begins with the comments directly above it, which are below line `limit`."""
    first = _start(statement)
    while first - 1 > limit and file.lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return first


def _with_comments(region: Region, statement: ast.stmt) -> list[str]:
    """The statement's lines and every comment between it and the statement before."""
    file, last = region.life.file, statement.end_lineno or statement.lineno
    comments = _comment_lines(file, statement, _end_before(region, statement))
    return taken(file, min(comments, default=statement.lineno), last)


def comments_above(file: Parsed, statement: ast.stmt, limit: int) -> list[str]:
    """The lines from the first comment below line `limit` to the statement."""
    first = min(_comment_lines(file, statement, limit), default=statement.lineno)
    return taken(file, first, statement.lineno - 1)


def _comment_lines(file: Parsed, statement: ast.stmt, limit: int) -> list[int]:
    gap = range(limit + 1, statement.lineno)
    return [number for number in gap if file.lines[number - 1].lstrip().startswith("#")]


def _end_before(region: Region, statement: ast.stmt) -> int:
    """The last line of what stands before `statement` in the region's block."""
    index = list(region.block).index(statement)
    before = region.block[index - 1] if index else region.life.statement
    return before.end_lineno or before.lineno


def _start(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)])


def _margin(region: Region) -> str:
    return indentation(region.life.file.lines[_start(region.body[0]) - 1])


def unit_of(life: Life) -> str:
    return unit_around(life.file, life.statement)


def _ended(lines: Sequence[str], newline: str) -> list[str]:
    """The lines, the last one with an end too."""
    return [line if line[-1:] in ("\r", "\n") else line + newline for line in lines]


def _is_on_own_lines(region: Region) -> bool:
    """Whether no other statement shares a line with one that is moved."""
    moved = [*region.body, *region.dropped, *region.after, *([region.release] if region.release else [])]
    return all(stands_alone(region.life, statement) for statement in [region.life.statement, *moved])


def stands_alone(life: Life, statement: ast.stmt) -> bool:
    """Whether nothing but a comment shares the statement's lines with it."""
    return is_whole(life.file, statement)


def is_whole(file: Parsed, statement: ast.stmt) -> bool:
    """Whether the statement begins and ends its lines, comments apart."""
    return file.stands_alone(statement, _start(statement))

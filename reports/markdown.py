"""Markdown for a comment on a pull request: the verdict, a table, and each path folded below its finding."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from auditor.model import Finding, Run, Severity
from reports import full
from reports._recommend import recommendations
from reports._text import shorten

SHOWS_EFFORT = True  # the audit counts the edits of `adopt` only where somebody reads them
LIMIT = 65_536  # characters that hosting services accept in one comment; bytes are counted, which is stricter
ROOM = 400  # for the sentence that says how much was left out
DRAWN = 100  # cells of a drawn path
_LONGEST = 300
_CELL = 100  # characters of one line in a table
_NOUN = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "info"}
_SPECIAL = re.compile(
    r"[^\w\s,()/='\"?;%^-]|_", re.ASCII
)  # what may begin markup, a mention, a link or a formula


def render(run: Run, *, color: bool, width: int) -> str:
    """As many findings as fit, errors first; the last line counts the others."""
    parts = [*_head(run)]
    size = sum(map(_size, parts))
    left_out = 0
    for finding in sorted(run.findings, key=lambda finding: list(Severity).index(finding.severity)):
        entry = _entry(finding, run)
        if left_out or size + _size(entry) > LIMIT - ROOM:
            left_out += 1
            continue
        parts.append(entry)
        size += _size(entry)
    if left_out:
        parts.append(f"\n**{left_out:,} more** did not fit here; `poolaudit audit` shows them all.\n")
    return "".join(parts)


def _head(run: Run) -> Iterator[str]:
    severities = Counter(finding.severity for finding in run.findings)
    counts = [_count(severities[kind], _NOUN[kind]) for kind in Severity if severities[kind]]
    counts += [_count(len(run.failures), "file") + " not analysed"] if run.failures else []
    yield f"## poolaudit: {', '.join(counts) or 'nothing found'}\n\n"
    total = run.summary
    yield (
        f"{_count(total.files, 'file')}, {_count(total.lines, 'line')}; "
        f"{_count(total.acquires, 'acquire')}, {total.followed:,} followed to the end"
        f"{f'; {run.known:,} known or out of scope' if run.known else ''}.\n"
    )
    yield from _findings(run)
    yield from _failures(run)
    yield from _recommendations(run)


def _findings(run: Run) -> Iterator[str]:
    if run.findings:
        yield "\n| Rule | | Findings |\n|---|---|---:|\n"
        named = {finding.code: finding for finding in run.findings}
        found = Counter(finding.code for finding in run.findings)
        for code, number in sorted(found.items(), key=lambda item: (-item[1], item[0])):
            yield f"| {code} {named[code].name} | {named[code].severity} | {number:,} |\n"


def _failures(run: Run, most: int = 20) -> Iterator[str]:
    if not run.failures:
        return
    yield "\n**Not analysed**\n\n"
    for failure in run.failures[:most]:
        place = f"{failure.path}:{failure.line}" if failure.line else failure.path
        yield f"- {code(place)}: {plain(failure.message)}\n"
    if len(run.failures) > most:
        yield f"- and {len(run.failures) - most:,} more\n"


def _recommendations(run: Run, most: int = 10) -> Iterator[str]:
    """Folded: they are about the whole project, and a pull request is about a part of it."""
    advice = recommendations(run)
    if not advice:
        return
    yield f"\n<details><summary>{_count(len(advice), 'class')} could use the pool more fully</summary>\n\n"
    yield "| Priority | Class | Bytes of its largest tensor | Edits |\n|---|---|---|---:|\n"
    for each in advice[:most]:
        row = each.row
        place = f"{code(shorten(row.name, _CELL))}<br>{code(shorten(f'{row.path}:{row.line}', _CELL))}"
        size = code(shorten(row.estimated_bytes, _CELL)) if row.estimated_bytes else ""
        why = f"<br>{plain(shorten(row.reason, _CELL))}" if row.reason else ""
        if each.assumed:
            size += f"<br>{each.size} if {plain(shorten(each.assumed, _CELL))}"
        yield f"| {row.priority or 'finish'}{why} | {place} | {size} | {row.edits} |\n"
    if len(advice) > most:
        yield f"\nand {len(advice) - most:,} more.\n"
    if command := next((each.command for each in advice if each.command), ""):
        yield f"\nTo begin with: {code(command)}\n"
    yield "\n</details>\n"


def _entry(finding: Finding, run: Run) -> str:
    brief = replace(
        finding, message=shorten(finding.message, _LONGEST), symbol=shorten(finding.symbol, DRAWN)
    )
    drawn = full.render(replace(run, findings=(brief,)), color=False, width=DRAWN)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", drawn)), default=0))
    place = f"{finding.span.path}:{finding.span.line}"
    return (
        f"\n<details><summary><b>{finding.code}</b> {code(place)} {prose(finding.message)}</summary>\n\n"
        f"{fence}text\n{drawn}{fence}\n\n</details>\n"
    )


def prose(text: str) -> str:
    """A message of ours: what stands between backticks came from the audited code, and so may the rest."""
    pieces = shorten(text, _LONGEST).split("`")
    if len(pieces) % 2 == 0:  # a backtick of the code's own: nobody can say which belong together
        return plain(text)
    return "".join(code(piece) if number % 2 else plain(piece) for number, piece in enumerate(pieces))


def code(text: str) -> str:
    """`text` as code, in which no reader looks for markup, mentions or links."""
    return f"<code>{_harmless(text)}</code>"


def plain(text: str) -> str:
    """`text` as text; a word joiner keeps `@` and `#` from calling people and issues."""
    return re.sub("(&#(?:64|35);)", "\\1\u2060", _harmless(text))


def _harmless(text: str) -> str:
    """Punctuation as character references, which never are markup."""
    return _SPECIAL.sub(lambda mark: _reference(mark[0]), shorten(text, _LONGEST))


def _reference(char: str) -> str:
    return f"&#{ord(char)};" if char.isascii() else char


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"

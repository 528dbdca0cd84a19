"""What --statistics adds: class by class how the pool is used, and what the project calls its parts."""

from collections.abc import Iterator, Sequence

from auditor.model import ClassRow, Conventions, Run
from reports._estimate import size
from reports._paint import QUIET, STRONG, Row
from reports._recommend import assumed, recommendations
from reports._rows import TITLE, listed, titled
from reports._text import cells, safe, wrap

SUPPORT = ("none", "partial", "full")
INDENT, BELOW = 26, 9  # cells left of a class's name, and of what stands below it
MOST_COMMANDS = 3
CONTINUED = " \\"  # a shell reads on, so a command may be copied whole
_PRIORITY = ("high", "medium", "low", None)
_SUPPORT_STYLE = {"none": "red", "partial": "yellow", "full": "green"}


def adoption_rows(run: Run, width: int) -> Iterator[Row]:
    """Class by class, then the names."""
    yield from _classes(run, width)
    yield from _next(run, width)
    lines = list(_conventions(run.conventions))
    if lines:
        yield from titled("Standard", lines, width)
    if run.conventions.unused_imports:
        yield from titled("Imported", [f"and not used: {listed(run.conventions.unused_imports)}"], width)


def _conventions(names: Conventions) -> Iterator[str]:
    """The standard and what differs from it."""
    yield from _name("acquire", names.acquire, names.other_acquires, names)
    yield from _name("release", names.release, names.other_releases, names)
    for use in names.switches:
        wanted = names.switch or use.name
        differs = f"; {_origin('switch', names)} `{wanted}`" if use.name != wanted else ""
        defaults = [f"{number} {kind}" for number, kind in ((use.on, "on"), (use.off, "off")) if number]
        if use.undecided:
            defaults.append(f"{use.undecided} without a default")
        yield f"switch `{use.name}`: {', '.join(defaults)}{differs}"
    if names.default is not None:
        yield f"pools are {'on' if names.default else 'off'} by default: {_origin('default', names)} so"


def _name(part: str, wanted: str | None, others: Sequence[str], names: Conventions) -> Iterator[str]:
    if wanted is None:
        return
    differing = f"; other names in use: {listed(others)}" if others else ""
    yield f"{_origin(part, names)} {part} by `{wanted}`{differing}"


def _origin(part: str, names: Conventions) -> str:
    return "the settings say" if part in names.declared else "most classes say"


def _classes(run: Run, width: int) -> Iterator[Row]:
    """Least supported and most urgent first: the order in which one would work through them."""
    if not run.classes:
        return
    yield [("Support  Priority  Edits  Class", STRONG)]
    for row in sorted(run.classes, key=_urgency):
        style = _SUPPORT_STYLE.get(row.support, "")
        first, *rest = _named(row, width)
        edits = "-" if row.edits is None else f"{row.edits:,}"
        yield [(f"{row.support:<9}", style), (f"{row.priority or '-':<10}{edits:>5}  ", ""), (first, "")]
        yield from ([(line, "")] for line in rest)
        for line in _why(row, width):
            yield [(line, QUIET)]
    yield []


def _named(row: ClassRow, width: int) -> list[str]:
    """Name and place; a place is not broken where a line of its own has room for it."""
    name, place = safe(row.name), safe(f"{row.path}:{row.line}")
    if cells(name) + 2 + cells(place) <= width - INDENT:
        return [f"{name}  {place}"]
    first, *rest = wrap(name, width - INDENT)
    return [first, *(" " * INDENT + line for line in rest), *wrap(place, width, first=BELOW, hanging=BELOW)]


def _urgency(row: ClassRow) -> tuple[int, int, str, int]:
    support = SUPPORT.index(row.support) if row.support in SUPPORT else len(SUPPORT)
    priority = _PRIORITY.index(row.priority) if row.priority in _PRIORITY else len(_PRIORITY)
    return support, priority, row.path, row.line


def _why(row: ClassRow, width: int) -> list[str]:
    """What the class allocates on its forward path, why that is large, and how many bytes under what."""
    parts = [f"{row.estimated_bytes} bytes"] if row.estimated_bytes else []
    if row.reason:
        parts.append(row.reason)
    text = ": ".join(parts)
    if row.support == "partial":
        text = f"{text}; {_lacking(row)}" if text else _lacking(row)
    if row.support != "full" and row.estimated_bytes and (under := assumed(row)):
        text += f"; about {size(row.estimated_bytes)} if {under}"
    return wrap(text, width, first=BELOW, hanging=BELOW) if text else []


def _lacking(row: ClassRow) -> str:
    """What keeps a class from full support, as far as it shows."""
    lacks = [what for what, there in (("release", row.releases), ("cleanup", row.cleans_up)) if not there]
    if row.acquires and lacks:
        return f"acquires, and has no {' and no '.join(lacks)} of its own"
    return "has the switch, and acquires nothing" if row.switch and not row.acquires else "see its findings"


def _next(run: Run, width: int) -> Iterator[Row]:
    """How to begin: the most urgent classes that `adopt` would edit."""
    commands = [each.command for each in recommendations(run) if each.command]
    title = "To adopt"
    for command in commands[:MOST_COMMANDS]:
        *begun, last = wrap(command, width - TITLE - len(CONTINUED), hanging=2)
        for part in [*(line + CONTINUED for line in begun), last]:
            yield [(f"{title:<{TITLE}}", STRONG), (part, "")]
            title = ""
    if len(commands) > MOST_COMMANDS:
        yield from titled(title, [f"and {len(commands) - MOST_COMMANDS} more classes"], width)

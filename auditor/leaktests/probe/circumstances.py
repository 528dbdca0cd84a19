"""Circumstances in which a finding may show, and that the plan's own arguments do not bring about: small
numbers, lists that hold something, another method called afterwards.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from auditor.leaktests.plan import Aim, Argument
from auditor.leaktests.probe import signatures

_NUMBERS = re.compile(r"(?:typing\.)?(?:list|List|Sequence|tuple|Tuple)\[int\b")
_SOME = "[0, 1]"

Feed = tuple[Argument, ...]


def other_feeds(feed: Feed, scope: Any, imports: Sequence[str]) -> Iterator[Feed]:
    """The same arguments with small numbers, so that what is asked for is there; and with something in the
    lists of numbers that objects among them hold, so that as much can be asked for.
    """
    small = tuple(_with(a, "1") if a.value.isdecimal() and int(a.value) > 1 else a for a in feed)
    full = tuple(_with(a, _filled(a.value, scope, imports)) for a in feed)
    for other in (small, full):
        if other != feed:
            yield other


def _with(argument: Argument, value: str) -> Argument:
    return Argument(argument.name, value, argument.positional)


def _filled(value: str, scope: Any, imports: Sequence[str]) -> str:
    """`Request(request_id=1)` as `Request(request_id=1, blocks=[0, 1])`."""
    name, opened, given = value.partition("(")
    if not (opened and name.isidentifier() and value.endswith(")")):
        return value
    kind = scope.value(name, imports=imports)
    parameters = signatures.constructor(kind) if isinstance(kind, type) else []
    lists = [p.name for p in parameters if not p.required and _NUMBERS.match(p.annotation)]
    more = [f"{name}={_SOME}" for name in lists if f"{name}=" not in given]
    return f"{value[:-1]}{', ' if given != ')' else ''}{more[0]})" if more else value


def sequels(thing: Any, called: str, aims: Sequence[Aim]) -> list[str]:
    """The methods, to be called without arguments, in which a finding's path goes on."""
    if not isinstance(thing, type):
        return []
    found = []
    for name, function in vars(thing).items():
        if inspect.isfunction(function) and name != called and not name.startswith("__"):
            lines, first = inspect.getsourcelines(function)
            inside = range(first, first + len(lines))
            needed = [p for p in signatures.call(function, skip_first=True) if p.required]
            file = inspect.getsourcefile(function) or ""
            if not needed and any(_goes_on(aim, file, inside) for aim in aims):
                found.append(name)
    return found


def _goes_on(aim: Aim, file: str, inside: range) -> bool:
    """Whether the path has a line in there, and the acquire is elsewhere."""
    return (
        aim.location.endswith(file.rpartition("/")[2])
        and aim.acquire not in inside
        and any(line in inside for line in aim.lines)
    )

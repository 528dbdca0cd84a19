"""Whether a text works on some field both ways, as pools do: judged from bytes, before it is parsed.

What is rare is looked for first: what is taken out, cleared or lowered. Only where a field has that done to
it, it is asked whether somewhere something is put into it, entered or raised."""

import re
from collections.abc import Iterator

_FIELD = re.compile(rb"self\.(\w+)(?:\[[^\]\n]*\]|\.(?:get|setdefault)\([^\n]*\))?$")
_PLACE = re.compile(rb"self\.(\w+)\[\w+$")
_HEAP = re.compile(rb"\(self\.(\w+)")
_LOCAL = re.compile(rb"(?:^|[^\w.])([a-z_]\w*)$")
_EMPTIED = re.compile(rb"\] = (?:None|False|0)")
LONGEST = 24
"""Letters of a local name that are looked at before a `.pop`."""
_OF_FIELD = rb"\b%b = self\.(\w+)(?:\.(?:get|setdefault)\(|\[)"

_PUT = (
    rb"self\.%b(?:\[[^\]\n]*\]|\.(?:get|setdefault)\([^\n]*?\))?\.(?:append\w*|add|put\w*|insert|push|extend\w*"
    rb")\(|(?:heappush|insort\w*)\(self\.%b\b"
)
_ENTERED = rb"self\.%b\[\w+\] = (?!None|False|0\b)"
_RAISED = rb"self\.%b(?:\[[^\]\n]*\])? \+= "


def works_both_ways(data: bytes) -> bool:
    """Whether what it does to one field it undoes somewhere."""
    if b"self." not in data:
        return False
    return (
        _any(_taken(data), _PUT, data)
        or _any(_cleared(data), _ENTERED, data)
        or _any(_before(b" -= ", _FIELD, data), _RAISED, data)
    )


def _any(fields: Iterator[bytes], undone: bytes, data: bytes) -> bool:
    count = undone.count(b"%b")
    return any(re.search(undone % ((name,) * count), data) for name in set(fields))


def _taken(data: bytes) -> Iterator[bytes]:
    locals_ = set()
    for start, at in _places(b"pop", data):
        if data.endswith(b"heap", start, at):
            if found := _HEAP.match(data, at + len(b"pop")):
                yield found[1]
        elif not data.endswith(b".", start, at):
            continue
        elif found := _FIELD.search(data, start, at - 1):
            yield found[1]
        elif found := _LOCAL.search(data, max(start, at - LONGEST), at - 1):
            locals_.add(found[1])
    for local in locals_:
        if local + b" = self." in data:
            yield from re.findall(_OF_FIELD % local, data)
    if b".put" in data:
        for needle in (b".get()", b".get_nowait()"):
            yield from _before(needle, _FIELD, data)


def _cleared(data: bytes) -> Iterator[bytes]:
    for emptied in _EMPTIED.finditer(data):
        at = emptied.start()
        if found := _PLACE.search(data, data.rfind(b"\n", 0, at) + 1, at):
            yield found[1]


def _before(needle: bytes, pattern: re.Pattern[bytes], data: bytes) -> Iterator[bytes]:
    """What the pattern finds in the line before each place of this needle."""
    for start, at in _places(needle, data):
        if found := pattern.search(data, start, at):
            yield found[1]


def _places(needle: bytes, data: bytes) -> Iterator[tuple[int, int]]:
    """Where it stands, after where its line begins."""
    at = data.find(needle)
    while at >= 0:
        yield data.rfind(b"\n", 0, at) + 1, at
        at = data.find(needle, at + 1)

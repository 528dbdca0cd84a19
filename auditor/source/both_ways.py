"""Whether a text works on some field both ways, as pools do: judged from bytes, before it is parsed.

What is rare is looked for first: what is taken out, cleared, struck off or lowered. Only where a field has
that done to it, it is asked whether somewhere something is put into it, entered or raised."""

import re
from collections.abc import Iterator

_FIELD = re.compile(rb"self\.(\w+)(?:\[[^\]\n]*\]|\.(?:get|setdefault)\([^\n]*\))?$")
_NAME = re.compile(rb"\w+")
_ANY_OF = b"next(iter(self."
_PLACE = re.compile(rb"self\.(\w+)\[\w+$")
_HEAP = re.compile(rb"\(self\.(\w+)")
_LOCAL = re.compile(rb"(?:^|[^\w.])([a-z_]\w*)$")
_EMPTIED = re.compile(rb"\] = (?:None|False|0)")
_HEAD = re.compile(rb"(\w+)(?:\n|\Z)")
_SAYING = (
    rb"(?:busy|use|used|taken|occupied|reserved|leased|allocated|borrowed|claimed|lent|assigned|free|idle"
    rb"|available|unused|spare|vacant)"
)
_SAID = re.compile(_SAYING)
_OWNED = re.compile(
    rb"\.((?:\w+_)?(?:owner|holder|tenant|occupant|borrower|lessee|client|user|req(?:uest)?|rid|job|task))$"
)
_FLAG = re.compile(rb"\.((?:\w+_)?" + _SAYING + rb")$")
_OF_CLASS = re.compile(rb"cls\.\w+(?:\.(?:pop|append|add|discard|remove)|\[\w+\] =| [-+]= )")
LONGEST = 24
"""Letters of a local name that are looked at before a `.pop`."""
_OF_FIELD = rb"\b%b = self\.(\w+)(?:\.(?:get|setdefault)\(|\[)"

_PUT = (
    rb"self\.%b(?:\[[^\]\n]*\]|\.(?:get|setdefault)\([^\n]*?\))?\.(?:append\w*|add|put\w*|insert|push|extend\w*"
    rb")\(|(?:heappush|insort\w*)\(self\.%b\b"
)
_ENTERED = rb"self\.%b\[\w+\] = (?!None|False|0\b)"
_ADDED = rb"self\.%b(?:\.(?:add|update)\(| \|= )"
_BIT = rb"self\.%b(?:\[[^\]\n]*\])? (?:\|=|= self\.%b \|) "
_JOINED = (
    rb"self\.%b(?:\.extend\(| \+= \w+(?:\n|\Z)| = (?:self\.%b \+ |\[\*|\w+ \+ self\.%b"
    rb"|(?:torch|np|numpy)\.\w*(?:cat|append)))"
)
_RAISED = rb"self\.%b(?:\[[^\]\n]*\])? \+= "


def works_both_ways(data: bytes) -> bool:
    """Whether what it does to one field it undoes somewhere."""
    if b"@classmethod" in data and _OF_CLASS.search(data):
        data = re.sub(rb"\bcls\.", b"self.", data)
    if b"self." not in data:
        return False
    return (
        _any(_taken(data), _PUT, data)
        or _any(_first(data), _ENTERED, data)
        or _any(_cut_off(data), _JOINED, data)
        or _any(_cleared(data), _ENTERED, data)
        or _any(_struck_off(data), _ADDED, data)
        or (b"<<" in data and _bits(data))
        or _linked(data)
        or _flagged(data)
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


def _first(data: bytes) -> Iterator[bytes]:
    """Tables of which whatever comes first is taken out."""
    yield from _before(b".popitem(", _FIELD, data)
    for _, at in _places(_ANY_OF, data):
        if found := _NAME.match(data, at + len(_ANY_OF)):
            yield found[0]


def _cleared(data: bytes) -> Iterator[bytes]:
    for emptied in _EMPTIED.finditer(data):
        at = emptied.start()
        if found := _PLACE.search(data, data.rfind(b"\n", 0, at) + 1, at):
            yield found[1]


def _struck_off(data: bytes) -> Iterator[bytes]:
    """What is called free or in use, or may be full at first."""
    if b".add(" not in data and b" |= " not in data and b".update(" not in data:
        return
    full = b"range(" in data
    for needle in (b".discard(", b".remove(", b".difference_update(", b" -= {", b" -= set("):
        yield from (name for name in _before(needle, _FIELD, data) if full or _SAID.search(name))


def _linked(data: bytes) -> bool:
    """`self.next[place] = self.head`, and `self.head = place`."""
    heads = {head for needle in (b"] = self.", b".next = self.") for head in _heads(needle, data)}
    return any(re.search(rb"self\.%b = \w+(?:\n|\Z)" % head, data) for head in heads)


def _heads(needle: bytes, data: bytes) -> Iterator[bytes]:
    for start, at in _places(needle, data):
        found = _HEAD.match(data, at + len(needle))
        if found and (needle != b"] = self." or _PLACE.search(data, start, at)):
            yield found[1]


def _flagged(data: bytes) -> bool:
    """`worker.busy = True`, and `worker.busy = False`; `slot.owner = request`, and `slot.owner = None`."""
    flags = set(_before(b" = True", _FLAG, data))
    if flags and not flags.isdisjoint(_before(b" = False", _FLAG, data)):
        return True
    owners = set(_before(b" = None", _OWNED, data))
    return any(re.search(rb"\.%b = (?!None)" % owner, data) for owner in owners)


def _cut_off(data: bytes) -> Iterator[bytes]:
    """Pieces from an end of what is called free, or may be full at first."""
    full = b"range(" in data
    if b".extend(" not in data and b"cat(" not in data and not any(_before(b" += ", _FIELD, data)):
        return
    for needle in (b"[:", b"[-"):
        yield from (name for name in _before(needle, _FIELD, data) if full or _SAID.search(name))


def _bits(data: bytes) -> bool:
    """Numbers of which bits are cleared and set, or turned."""
    lowered = (name for needle in (b" &= ", b" & ~") for name in _before(needle, _FIELD, data))
    return _any(lowered, _BIT, data) or any(_before(b" ^= ", _FIELD, data))


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

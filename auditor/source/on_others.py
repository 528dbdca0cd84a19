"""Whether a text does to some objects, or to what a helper shows, what it undoes elsewhere.

Judged from bytes: `slot.worn = True` and `slot.worn = False`, `page.pins += 1` and `page.pins -= 1`,
`bins = self._bin(kind)` with `bins.pop()` and `self._bin(kind).append(thing)`, `tier.vacant.pop()` and
`tier.vacant.append(slot)`. No name says so: those who use
them are asked."""

import re
from collections import Counter
from collections.abc import Iterator

from auditor.source.searched import Searched

_OF_ANY = re.compile(rb"\.(\w+)(?:\[[^\]\n]*\])?$")
_OF_ANOTHER = re.compile(rb"(?<!self)(?<!config)(?<!args)\.(\w+)$")
_OF_HELPER = re.compile(rb"self\.(\w+)\([^()\n]*$")
_SETTINGS = frozenset({b"requires_grad", b"training", b"enabled", b"use_cache", b"daemon", b"allow_tf32"})
"""Flags that are switched everywhere."""

_ASKED = rb"(?:if|not|and|or) (\w+)\.%b\b"
_GOING_OVER = re.compile(rb"\bfor (?:\w+, )?(\w+) in ")
_OWN = re.compile(rb"self\.(\w+)$")
_WORD = re.compile(rb"\w+")
_GLOBAL = re.compile(rb"    global ([\w, ]+)\n")
_CLEARING = (b" = False\n", b" = None\n", b"] = 0\n")
_TABLE = re.compile(rb"(?:^|[^\w.])(\w+)\[[^\n]*$")
_POPPING = (b".pop()", b".popleft()", b".pop(0)")
_PUTTING = (b").append(", b").add(", b").appendleft(", b").release()", b").put(")
_SHOWN = rb"(?:= (?:await )?self\.%b\(|self\.%b\([^()\n]*\)\.(?:pop|acquire|popleft|get)\()"


def works_on_others(text: Searched) -> bool:
    """Both ways."""
    data = text.data
    ways = _counts(data) or _marks(data) or _helped(text) or _changed_by_several(text)
    return ways or _at_numbers(data) or _stocks(text)


def _counts(data: bytes) -> bool:
    return any(b".%b += " % name in data for name in set(_before(b" -= ", _OF_ANY, data)))


def _marks(data: bytes) -> bool:
    """Flags of objects, and places of a module's table."""
    cleared = [each for way in _CLEARING for each in _lines_before(way, data)]
    flags = set(_before(b" = False\n", _OF_ANOTHER, data)) - _SETTINGS
    tables = {found[1] for each in cleared if (found := _TABLE.search(each))}
    gone_over = set(_GOING_OVER.findall(data)) if flags else set[bytes]()
    return any(
        re.search(rb"(?<!self)\.%b = True\b" % name, data) is not None
        and not gone_over.isdisjoint(re.findall(_ASKED % name, data))
        for name in flags
    ) or any(
        (b"\n%b = " % name in data or b"\n%b: " % name in data)
        and re.search(rb"(?<![\w.])%b\[[^\n]*?\] = (?!None|False|0\b)" % name, data) is not None
        for name in tables
    )


def _changed_by_several(text: Searched) -> bool:
    """Names of the module."""
    if not text.has(b" global "):
        return False
    data = text.data
    told = Counter(name for line in _GLOBAL.findall(data) for name in set(_WORD.findall(line)))
    return any(
        times > 1 and re.search(rb"(?<![\w.])%b (?:[-+&|]= |= (?:\w+\[|m(?:in|ax)\()|-|\+)" % name, data)
        for name, times in told.items()
    )


def _at_numbers(data: bytes) -> bool:
    """`place = self.ring[self.tail % n]`, `self.ring[self.head % n] = place`"""
    put, read = set[bytes](), set[bytes]()
    for field, at in _ahead(b"[self.", _OWN, data):
        line = data[at : data.find(b"\n", at)]
        (put if b"] = " in line else read).add(field)
    return not put.isdisjoint(read) and data.count(b" += 1\n") > 1


def _helped(text: Searched) -> bool:
    """`bins = self._bin(kind)` with `bins.pop()`, and `self._bin(kind).append(thing)`."""
    ways = filter(text.has, _PUTTING)
    shown = {name for way in ways for name in _before(way, _OF_HELPER, text.data)}
    return any(re.search(_SHOWN % (name, name), text.data) is not None for name in shown)


def _stocks(text: Searched) -> bool:
    """Of records: what is taken out of the one is put into the other."""
    taken = {name for way in filter(text.has, _POPPING) for name in _before(way, _OF_ANOTHER, text.data)}
    return any(
        re.search(rb"\w(?<!self)\.%b\.(?:append|appendleft|add)\(" % name, text.data) is not None
        for name in taken
    )


def _before(needle: bytes, pattern: re.Pattern[bytes], data: bytes) -> Iterator[bytes]:
    """What the pattern finds in the line before each place of this needle."""
    return (found for found, _ in _ahead(needle, pattern, data))


def _ahead(needle: bytes, pattern: re.Pattern[bytes], data: bytes) -> Iterator[tuple[bytes, int]]:
    """The same with the place."""
    at = data.find(needle)
    while at >= 0:
        if found := pattern.search(data, data.rfind(b"\n", 0, at) + 1, at):
            yield found[1], at
        at = data.find(needle, at + 1)


def _lines_before(needle: bytes, data: bytes) -> Iterator[bytes]:
    """What stands in the line before each place of this needle."""
    at = data.find(needle)
    while at >= 0:
        yield data[data.rfind(b"\n", 0, at) + 1 : at]
        at = data.find(needle, at + 1)

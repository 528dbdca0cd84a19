"""Whether a text does to some objects, or to what a helper shows, what it undoes elsewhere.

Judged from bytes: `slot.worn = True` and `slot.worn = False`, `page.pins += 1` and `page.pins -= 1`,
`bins = self._bin(kind)` with `bins.pop()` and `self._bin(kind).append(thing)`, `tier.vacant.pop()` and
`tier.vacant.append(slot)`. No name says so: those who use
them are asked."""

import re
from collections.abc import Iterator

_OF_ANY = re.compile(rb"\.(\w+)(?:\[[^\]\n]*\])?$")
_OF_ANOTHER = re.compile(rb"(?<!self)(?<!config)(?<!args)\.(\w+)$")
_OF_HELPER = re.compile(rb"self\.(\w+)\([^()\n]*$")
_SETTINGS = frozenset({b"requires_grad", b"training", b"enabled", b"use_cache", b"daemon", b"allow_tf32"})
"""Flags that are switched everywhere."""

_CLEARING = (b"] = False\n", b"] = None\n", b"] = 0\n")
_TABLE = re.compile(rb"(?:^|[^\w.])(\w+)\[[^\n]*$")
_POPPING = (b".pop()", b".popleft()", b".pop(0)")
_PUTTING = (b").append(", b").add(", b").appendleft(", b").release()", b").put(")
_SHOWN = rb"(?:= (?:await )?self\.%b\(|self\.%b\([^()\n]*\)\.(?:pop|acquire|popleft|get)\()"


def works_on_others(data: bytes) -> bool:
    """Both ways."""
    return _counts(data) or _flags(data) or _helped(data) or _places_of_module(data) or _stocks(data)


def _counts(data: bytes) -> bool:
    lowered = set(_before(b" -= ", _OF_ANY, data)) | set(_before(b", -1)", _OF_HELPER, data))
    return any(b".%b += " % name in data or b".%b(" % name in data for name in lowered)


def _flags(data: bytes) -> bool:
    lowered = set(_before(b" = False\n", _OF_ANOTHER, data)) | set(_before(b" = None\n", _OF_ANOTHER, data))
    return any(
        re.search(rb"(?<!self)\.%b = (?!None|False)" % name, data) is not None for name in lowered - _SETTINGS
    )


def _places_of_module(data: bytes) -> bool:
    cleared = {name for way in _CLEARING for name in _before(way, _TABLE, data)}
    return any(
        (b"\n%b = " % name in data or b"\n%b: " % name in data)
        and re.search(rb"(?<![\w.])%b\[[^\n]*?\] = (?!None|False|0\b)" % name, data) is not None
        for name in cleared
    )


def _stocks(data: bytes) -> bool:
    """Of records: what is taken out of the one is put into the other."""
    taken = {name for way in _POPPING for name in _before(way, _OF_ANOTHER, data)}
    return any(
        re.search(rb"\w(?<!self)\.%b\.(?:append|appendleft|add)\(" % name, data) is not None for name in taken
    )


def _helped(data: bytes) -> bool:
    shown = {name for way in _PUTTING for name in _before(way, _OF_HELPER, data)}
    return any(re.search(_SHOWN % (name, name), data) is not None for name in shown)


def _before(needle: bytes, pattern: re.Pattern[bytes], data: bytes) -> Iterator[bytes]:
    """What the pattern finds in the line before each place of this needle."""
    at = data.find(needle)
    while at >= 0:
        if found := pattern.search(data, data.rfind(b"\n", 0, at) + 1, at):
            yield found[1]
        at = data.find(needle, at + 1)

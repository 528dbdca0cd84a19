"""Whether a text does to some objects, or to what a helper shows, what it undoes elsewhere.

Judged from bytes: `slot.worn = True` and `slot.worn = False`, `page.pins += 1` and `page.pins -= 1`,
`bins = self._bin(kind)` with `bins.pop()` and `self._bin(kind).append(thing)`, `tier.vacant.pop()` and
`tier.vacant.append(slot)`. No name says so: those who use them are asked."""

import re
from collections import Counter

from auditor.source.searched import Searched, before, ending_before, places

_OF_ANY = re.compile(rb"\.(\w+)(?:\[[^\]\n]*\])?$")
_OF_ANOTHER = re.compile(rb"(?<!self)(?<!config)(?<!args)\.(\w+)$")
_OF_HELPER = re.compile(rb"self\.(\w+)\([^()\n]*$")
_SETTINGS = frozenset({b"requires_grad", b"training", b"enabled", b"use_cache", b"daemon", b"allow_tf32"})
"""Flags that are switched everywhere."""

_ASKED = rb"(?:if|not|and|or) (\w+)\.%b\b"
_RAISED = rb"\.%b(?<!self\.%b) = True\b"
_GOING_OVER = re.compile(rb"for (?<!\wfor )(?:\w+, )?(\w+) in ")  # a literal first
_LOWERED = re.compile(rb"""\[["'](\w+)["']\] -= 1""")
_NAME_OR_PART = re.compile(rb"(\w+)(?:\[[^\]\n]*\])?$")
_OF_EVENTS = (b".wait()", b".clear()", b".set()")
_OWN_OR_PART = re.compile(rb"self\.(\w+)(?:\[[^\]\n]*\])*$")
_OWN = re.compile(rb"self\.(\w+)$")
_WORD = re.compile(rb"\w+")
_GLOBAL = re.compile(rb"    global ([\w, ]+)\n")
_EMPTIED = re.compile(rb"\] = (?:False|None|0)\n")
_TABLE = re.compile(rb"(?:^|[^\w.])(\w+)\[[^\n]*$")
_POPPING = (b".pop()", b".popleft()", b".pop(0)")
_PUTTING = (b").append(", b").add(", b").appendleft(", b").release()", b").put(")
_SHOWN = rb"(?:= (?:await )?self\.%b\(|self\.%b\([^()\n]*\)\.(?:pop|acquire|popleft|get)\()"


def works_on_others(text: Searched) -> bool:
    """Both ways."""
    data = text.data
    ways = (
        _counts(data)
        or _counts_under(data)
        or _lights(data)
        or _empties(text)
        or _locks(text)
        or _shuts(text)
        or _marks(data)
        or _helped(text)
        or _changed_by_several(text)
    )
    return ways or _at_numbers(data) or _stocks(text)


def _counts(data: bytes) -> bool:
    """Also of those that others than itself count: `buffer.count = 1`, `buffer.count -= 1`."""
    return any(b".%b += " % name in data for name in set(before(b" -= ", _OF_ANY, data))) or any(
        b".%b = 1\n" % name in data for name in set(before(b" -= 1", _OF_ANOTHER, data))
    )


def _lights(data: bytes) -> bool:
    """`slab.bits |= 1 << at`, `self.slabs[n].bits &= ~(1 << at)`"""
    return any(b".%b |= 1 <<" % name in data for name in set(before(b" &= ~", _OF_ANY, data)))


def _empties(text: Searched) -> bool:
    """`if bench.sitter is None: bench.sitter = who`, and `bench.sitter = None`"""
    asked = set(ending_before(b" is None", _OF_ANOTHER, text.data))
    emptied = asked & set(ending_before(b" = None\n", _OF_ANOTHER, text.data)) if asked else set[bytes]()
    return any(re.search(rb"\.%b = (?!None)" % name, text.data) for name in emptied)


def _locks(text: Searched) -> bool:
    """`lock = self.locks[key]` with `lock.acquire()`, and `self.locks[key].release()`"""
    if not (text.has(b".acquire()") and text.has(b".release()")):
        return False
    taken, left = (set(before(way, _NAME_OR_PART, text.data)) for way in (b".acquire()", b".release()"))
    named = any(b"%b = self." % name in text.data for name in taken - left) and bool(left)
    return named or not taken.isdisjoint(left)


def _counts_under(data: bytes) -> bool:
    """`record["users"] += 1`, `self.active[name]["users"] -= 1`"""
    if b"] -= 1" not in data:
        return False
    return any(
        b'["%b"] += 1' % key in data or b"['%b'] += 1" % key in data for key in set(_LOWERED.findall(data))
    )


def _shuts(text: Searched) -> bool:
    """`self.ready[side].wait()`, `self.ready[side].clear()`, and `self.ready[side].set()`"""
    if not all(map(text.has, _OF_EVENTS)):
        return False
    ways = [set(before(way, _OWN_OR_PART, text.data)) for way in _OF_EVENTS]
    return bool(set.intersection(*ways))


def _marks(data: bytes) -> bool:
    """Flags of objects, and places of a module's table."""
    flags = set(ending_before(b" = False\n", _OF_ANOTHER, data)) - _SETTINGS
    tables = {
        found[1]
        for nothing in _EMPTIED.finditer(data)
        if (found := _TABLE.search(data, data.rfind(b"\n", 0, nothing.start()) + 1, nothing.start()))
    }
    raised = [name for name in flags if re.search(_RAISED % (name, name), data)]
    gone_over = set(_GOING_OVER.findall(data)) if raised else set[bytes]()
    return any(not gone_over.isdisjoint(re.findall(_ASKED % name, data)) for name in raised) or any(
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
    for start, at in places(b"[self.", data):
        if found := _OWN.search(data, start, at):
            written = b"] = " in data[at : data.find(b"\n", at)]
            (put if written else read).add(found[1])
    return not put.isdisjoint(read) and data.count(b" += 1\n") > 1


def _helped(text: Searched) -> bool:
    """`bins = self._bin(kind)` with `bins.pop()`, and `self._bin(kind).append(thing)`."""
    ways = filter(text.has, _PUTTING)
    shown = {name for way in ways for name in before(way, _OF_HELPER, text.data)}
    return any(re.search(_SHOWN % (name, name), text.data) is not None for name in shown)


def _stocks(text: Searched) -> bool:
    """Of records: what is taken out of the one is put into the other."""
    taken = {
        name for way in filter(text.has, _POPPING) for name in ending_before(way, _OF_ANOTHER, text.data)
    }
    return any(
        re.search(rb"\w(?<!self)\.%b\.(?:append|appendleft|add)\(" % name, text.data) is not None
        for name in taken
    )

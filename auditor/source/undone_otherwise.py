"""Ways to undo what was done to a field that are seldom written: judged from bytes, by a word that each of
them cannot be written without."""

import re

from auditor.source.searched import Searched

_CLEARED = re.compile(
    rb"self\.(?:(\w+)\[[^\]\n]*\] = (?:\"\"|'')|(\w+\.\w+)\[[^\]\n]*\] = (?:0|None|False|-1))\n"
)
_FILLED = rb"self\.%b\[[^\]\n]*\] = (?!None|False|0\n|-1\n|\"\"|'')"
_LINKED = re.compile(rb", self(?<=\w, self)\.(\w+) = self\.\1, self\.\1\.\w+\n")
_KEYWORD = re.compile(rb"replace\([^\n]{0,400}\b(\w{1,60})=(?:(True)|(False|None))\b")
_STRUCK = re.compile(rb"self\.(\w+) = self\.\1 - \{")

_TOGETHER = (
    (b".subtract(", b".update("),
    (b".is_set()", b".clear()", b"].set()"),
    (b".acquire(blocking=False)", b"].release()"),
    (b".acquire(False)", b"].release()"),
    (b".lpop(", b"push("),
    (b".rpop(", b"push("),
    (b".spop(", b".sadd("),
    (b".decr(", b".incr("),
    (b".decrby(", b".incrby("),
)
"""What stands in one file where the last undoes the first."""


def undone_otherwise(text: Searched) -> bool:
    data = text.data
    if any(text.has(words[0]) and all(word in data for word in words) for words in _TOGETHER):
        return True
    if text.has(b"replace(") and _replaced_both_ways(data):
        return True
    if any(b"self.%b | {" % name in data for name in _STRUCK.findall(data)):
        return True
    cleared = {one or other for one, other in _CLEARED.findall(data)}
    return (
        any(re.search(_FILLED % re.escape(name), data) for name in cleared)
        or _LINKED.search(data) is not None
    )


def _replaced_both_ways(data: bytes) -> bool:
    said = _KEYWORD.findall(data)
    return not {name for name, yes, _ in said if yes}.isdisjoint(name for name, _, no in said if no)

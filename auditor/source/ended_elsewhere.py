"""Whether a text has objects that undo by a method what was done to another object: judged from bytes.

`self.server.locked.discard(self.key)` of a lease, `self.locked.add(key)` of the server that made it. Such a
method is told nothing, so what it takes out, puts back or counts by is a field of its own, one, or itself."""

import re
from collections.abc import Iterator

from auditor.source.searched import Searched

_THROUGH = rb"[ \t]*self\.\w+\.(?:\w+\.)?(\w+)"
_FIELD = re.compile(_THROUGH + rb"(?:\[[^\]\n]*\])?(?=[. ])")
_OF_MODULE = re.compile(rb"[ \t]*(?:del )?(_?[A-Z][A-Z0-9_]+)(?=[.\[])")
_DELETED = re.compile(rb"[ \t]*del self\.\w+\.(?:\w+\.)?(\w+)\[")

_TOLD = re.compile(
    rb"""\(self[.)](?:(?P<taken>(?<=\.pop\(self\.))
        |(?P<put>(?<=\.append\(self[.)])|(?<=\.appendleft\(self[.)])|(?<=\.add\(self[.)])
            |(?<=\.put\(self[.)])))""",
    re.VERBOSE,
)
_KEYED = re.compile(rb"\[self\.\w+\](?:\n| = (?:(?P<cleared>None|False|0|[\"']free[\"']|[\"']idle[\"'])\n))")
_COUNTED = re.compile(
    rb"= (?:(?P<less>(?<= -= )(?:1\n|self\.))|(?P<more>(?<= \+= )self\.)|(?P<back>(?<=\w = )self\.\w+\n))"
)
_PUSHED = re.compile(rb"heappush\(self\.\w+\.(?:\w+\.)?(\w+), self\.")
_BITS = re.compile(
    rb"1 << (?P<bits>self\.)(?:(?<=[|^]= 1 << self\.)|(?<=&= ~1 << self\.)|(?<=&= ~\(1 << self\.))"
)
"""A literal first: searched fifty times as fast."""

_PRIVATE = re.compile(rb"\._(?<!self\._)(?=(\w+)\()")
_MADE_OF_ITSELF = re.compile(rb"\b[A-Z]\w*\((?:self|[^()\n]*=self)[,)]")
_OWN_FIELD = re.compile(rb"\bself\.\w+$")

_ENTERED = rb"\b%b(?:\.(?:add|append|put|insert|setdefault)\w*\(|\[[^\n]*?\] = (?!None|False|0\n))"
_BEFORE = {
    "taken": _ENTERED,
    "cleared": _ENTERED,
    "put": rb"\b%b\.(?:pop|get_nowait|remove|discard)|heappop\([^\n]*\b%b\)",
    "back": rb"\.%b \+= ",
    "less": rb"\.%b(?:\[[^\n]*?\])? (?:\+= |= [^\n]*\+)",
    "bits": rb"\.%b (?:[|^]|&)= ",
    "more": rb"\.%b(?:\[[^\n]*?\])? (?:-= |= [^\n]*-)",
}
"""What must stand elsewhere, by what is done in the end."""


def ends_elsewhere(text: Searched) -> bool:
    """Whether what one object does to a field of another has its opposite in the same file."""
    if b"self." not in text.data:
        return False
    told = any(_is_done(way, name, text.data) for way, name in sorted(set(_ended(text))))
    return told or _tells_its_maker(text.data)


def _tells_its_maker(data: bytes) -> bool:
    """`self.quota._voided(self.amount)`, of a private method that stands in the same file, where somebody
    makes an object that knows him: `Receipt(self, amount)`."""
    for told in _PRIVATE.finditer(data):
        start = data.rfind(b"\n", 0, told.start()) + 1
        if _OWN_FIELD.search(data, start, told.start()) and b"def _%b(self" % told[1] in data:
            return _MADE_OF_ITSELF.search(data) is not None
    return False


def _is_done(way: str, name: bytes, data: bytes) -> bool:
    pattern = _BEFORE[way]
    return re.search(pattern % ((name,) * pattern.count(b"%b")), data) is not None


def _ended(text: Searched) -> Iterator[tuple[str, bytes]]:
    data = text.data
    if text.has(b"heappush("):
        yield from (("put", pushed[1]) for pushed in _PUSHED.finditer(data))
    for removing in filter(text.has, (b".discard(", b".remove(")):
        at = data.find(removing)
        while at >= 0:
            start = data.rfind(b"\n", 0, at) + 1
            if (found := _FIELD.match(data, start) or _OF_MODULE.match(data, start)) and found.end() == at:
                yield "taken", found[1]
            at = data.find(removing, at + 1)
    for told in (_TOLD, _KEYED, _COUNTED, _BITS):
        for done in told.finditer(data):
            start = data.rfind(b"\n", 0, done.start()) + 1
            if (found := _FIELD.match(data, start) or _OF_MODULE.match(data, start)) and done.lastgroup:
                yield done.lastgroup, found[1]
            elif (found := _DELETED.match(data, start)) is not None:
                yield "taken", found[1]

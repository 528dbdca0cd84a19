"""Whether a text works on some field both ways, as pools do: judged from bytes, before it is parsed.

One pass notes what is done to each field of `self`; what undoes what is asked of these notes. Only what
is written otherwise (heaps, local names of a field, flags of other objects) is looked for by itself."""

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from auditor.source.on_others import works_on_others
from auditor.source.searched import Searched, before, ending_before, places
from auditor.source.undone_otherwise import undone_otherwise

_DONE = re.compile(
    rb"""self\.(\w++)(?:
    (?:\[(?:[^][\n]|\[[^]\n]*+\])*+\]|\.(?:get|setdefault)\([^\n]*?\))?(?:
        \.(?:(?P<first>popitem\()|(?P<taken>pop(?!\(["']))|(?P<got>get(?:_nowait)?\((?:\)|block|timeout|True|False))|(?P<queued>put\w*+\()
            |(?P<extended>extend\w*+\()|(?P<added>add\()|(?P<put>(?:append\w*+|insert|push)\()|(?P<updated>update\()
            |(?P<struck>(?:discard|remove|difference_update)\()|(?P<added_to>add_\()|(?P<lessened>sub_\())
        |\ (?:(?P<less>-=\ (?:\{|set\())|(?P<fewer>-=\ )|(?P<more>\+=\ \w++(?:\n|\Z))|(?P<raised>\+=\ )
            |(?P<also>\|=\ )|(?P<masked>&(?:=\ |\ ~))|(?P<turned>\^=\ )|(?P<summed>[+-]\ )))
    |\[[^][\n:]*+:[^][\n:]*+\]\ =\ (?P<blanked>\[(?:None|False|0)\]\ \*|bytes\(|b["']\\x00)
    |(?:\[(?:[^][\n]|\[[^]\n]*+\])*+\])++\ =\ (?:
        (?P<emptied>self\.\w++\[[^]\n]*+\],\ None|None|False|0|-1(?!\d)
        |(?:\w++\.)?(?:IDLE|FREE|AVAILABLE|UNUSED|VACANT|EMPTY)\b
        |["'](?:idle|free|available|unused|vacant)["'])
        |(?P<linked>self\.\w++(?:\n|\Z))|(?P<entered>))
    |(?P<cut>\[[:-])
    |\[[\w.]++\ ?:[\w.+\ ]++\]\ =\ (?P<spanned>b["']\\x0|\[?(?:True|False|0|1)\b|bytes\()
    |\ =\ (?:(?P<joined>self\.\1\ \+\ |\[\*|\w++\ \+\ self\.\1|(?:torch|np|numpy)\.\w*(?:cat|append))
            |m(?:in|ax)\([^\n]*?self\.\1\ (?:(?P<plus>\+)|(?P<minus>-))
        |(?P<lit>self\.\1\ \|\ )|(?P<named>[a-z_]\w*+\n)))""",
    re.VERBOSE,
)
"""What follows the field, by the name of its group."""

_PUT = ("put", "queued", "added", "extended")
_ENTERED = ("entered", "linked", "spanned")
_JOINED = ("extended", "more", "joined")
_UNDONE = (
    (("taken", "first"), _PUT),
    (("got",), ("queued",)),
    (("first",), (*_ENTERED, "emptied")),
    (("emptied", "spanned"), _ENTERED),
    (("fewer", "less", "minus", "lessened"), ("raised", "more", "plus", "added_to")),
    (("blanked",), _ENTERED),
    (("fewer",), _ENTERED),
    (("taken",), _ENTERED),
    (("struck",), _PUT),
    (("sorted",), ("taken", "struck", "entered")),
)
_UNDONE_OF_FREE = (
    (("cut",), _JOINED),
    (("struck", "less", "fewer"), ("added", "updated", "also")),
    (("taken",), ("updated",)),
)
"""Of these the field has to be called what is free or in use, or may be full at first."""

_BITS = ("also", "lit")
_INTO_ORDER = rb"(?:heappush|insort\w*)\(self\.(\w+)"
_NAME = re.compile(rb"\w+")
_KEYED = re.compile(rb"(\w+)\[")
_HEAD = re.compile(rb"(\w+)(?:\n|\Z)")
_ANY_NAME = re.compile(rb"(?:^|[^\w.])(\w+)(?:\[[^\]\n]*\])?$")
_LAST_WORD = re.compile(rb"(\w+)$")
_IS_FIELD = b" = self."
_LOOKED_INTO = re.compile(rb"(\w+)[\[.\n]")
_STATED = re.compile(rb" = \(?((?:[A-Z]\w*\.)?[A-Z][A-Z0-9_]+|\"[a-z_]+\"|'[a-z_]+')(?:\n|, |\Z)")
_OF_STATES = re.compile(rb"state|status|phase|stage")
"""Fields whose texts say how a thing is, and not of what kind."""
_ANY_FIELD = re.compile(rb"\.(\w+)(?:\[[^\]\n]*\])?$")
_OF_RECORD = re.compile(rb"\.\w+\[[^\]\n]*\]\[[\"'](\w+)[\"']\]$")
"""`self.ring[at]["owner"]`, of an array of records, or a list of them."""
_RECKONED = re.compile(rb"self\.(\w+) (?:-|[<>]=?) self\.(\w+)")
"""What has begun, without what is over."""
_ASKED = (b"== ", b" is ", b" in (", b".index(", b"is not ", b"!= ")
_LOCAL = re.compile(rb"(?:^|[^\w.])([a-z_]\w*)$")
_OF_FIELD = rb"\b%b = self\.(\w+)(?:\.(?:get|setdefault)\(|\[|\n)"
_OF_TURN = rb"for (?:\w+, )?%b in (?:\w+\()*self\.(\w+)\.(?:values|items)\("
_WRITTEN_OTHERWISE = (
    (frozenset({b"heappop"}), b"heappop(self.", "taken", _NAME),
    (frozenset({b"iter"}), b"next(iter(self.", "first", _NAME),
    (frozenset({b"del"}), b"del self.", "taken", _KEYED),
)
"""What is done to fields, and the word that it cannot be written without."""
_LINKS = (b"next", b"nxt")
_SAYING = (
    rb"(?:busy|held|use|used|taken|occupied|reserved|leased|allocated|borrowed|claimed|lent|assigned|free|idle"
    rb"|available|unused|spare|vacant|live|flight|outstanding|holes|gaps)"
)
_SAID = re.compile(_SAYING)
_OWNED = re.compile(
    rb"\.((?:\w+_)?(?:owner|holder|tenant|occupant|borrower|lessee|client|user|req(?:uest)?|rid|job|task))$"
)
_FLAG = re.compile(rb"\.((?:\w+_)?" + _SAYING + rb")$")
_OWN = re.compile(rb"\.(\w+)$")
_WAITED_FOR = re.compile(rb"(?:wait_for\(lambda: [^\n]*?|while )(?:not )?self\.(\w+)")
_STATE = re.compile(
    rb"\.\w++ = (?:(?:\w+\.)?(?:IDLE|FREE|AVAILABLE|UNUSED|VACANT)"
    rb"|[\"'](?:idle|free|available|unused|vacant))\b"
)
_RESTING = frozenset(b"IDLE FREE AVAILABLE UNUSED VACANT idle free available unused vacant".split())
_SIGNS = (b".state = ", b".status = ", b".IDLE", b".FREE")
_USED = re.compile(
    rb"\.((?:\w+_)?(?:refs?|refcount|refcnt|references|pins|uses|users|readers|holders|borrowers|sharers"
    rb"|load|active|in_?flight|outstanding|pending|running|leases|sessions|streams))$"
)
_SET_TOGETHER = re.compile(rb"self\.(\w++)(?:, self\.\w++)++ = [a-z_]\w*+\n")
"""`self.top, self.live = mark`"""
_CUT_SPAN = re.compile(rb"\] = \(\w+ \+ (\w+), \w+ - \1\)")
"""A gap of which the first part goes: `self.gaps[at] = (start + n, length - n)`."""

_FIRST_OF_ALL = (b"(0, ", b"[0, ", b"{0: ")
_WHOLE_AT_FIRST = re.compile(rb"self\.\w++(?:: [^\n=]++)? = (?:\[(?:\(|\[|[\w.]++\()0, |\{0: )[a-z]")
"""All that there is in one span: `self.holes = [(0, size)]`, `[Span(0, size)]`, `{0: size}`."""

_RINGED = re.compile(rb"(\.next\w*+) = \w++\1\b")
"""A node that is left out of a list of nodes."""

_TAKING = (b".pop", b"heappop(", b".get_nowait(", b".get()", b".get(timeout", b".get(block")
_STRIKING = (b".discard(", b".remove(", b"] = -1")
_MODULES_OWN = re.compile(rb"\n(\w+)(?:: [^\n=]+)? = (?:set\(\)|(?:np|numpy|torch)\.full\()")
"""Sets of a module, and its arrays that hold -1 where a place is free."""
_CALLERS_OWN = frozenset({b"self", b"kwargs", b"args", b"config", b"state_dict"})
"""Names of what is taken apart everywhere, and is no store."""

_OF_CLASS = re.compile(rb"(?<![\w.])([A-Z]\w*|cls)\.\w+(?:\[[^\]\n]*\])?$")
_NAMED_OF_CLASS = rb"%b(?<![\w.]%b) = ([A-Z]\w*|cls)\.\w"
"""A store of the class, by itself or under a local name."""
_WHOLE = rb"%b(?<![\w.]%b)"  # a literal first: searched several times as fast
_LOOKED_UP = _WHOLE + rb" = (\w+)(?:\.(?:get|setdefault)\(|\[|\n)"
_OF_THREAD = (b" = local()", b" = threading.local()")
_HANDED_OUT = re.compile(rb"return (?:[\w.]+\()?([a-z_]\w*(?:=\w+)?(?:, [a-z_]\w*(?:=\w+)?)+)")
_SHOWING = re.compile(rb"\ndef (\w+)\([^\n]*:\n(?:[ \t][^\n]*\n)*?[ \t]+return (self\.\w+)")
LONGEST = 24
"""Letters of a local name that are looked at before a `.pop`."""

Notes = defaultdict[str, set[bytes]]


@lru_cache(maxsize=1 << 13)
def written_both_ways(text: str) -> bool:
    """The same of a text, of which several ask: a class is asked for its shape, its bases' and its losses."""
    return works_both_ways(Searched(text.encode(errors="replace")))


def works_both_ways(text: Searched) -> bool:
    """Whether what it does to one field it undoes somewhere."""
    if works_on_others(text) or undone_otherwise(text):
        return True
    data = _shared_as_fields(text) if any(map(text.has, _TAKING + _STRIKING)) else text.data
    if b"self." not in data:
        return False
    notes = _notes(data, text)
    kept = (notes["raised"] | notes["more"]) & notes["named"]  # `self.top += n`, and `self.top = mark`
    notes["raised"] |= notes["named"] & notes["summed"]  # `after = self.spent + n`, `self.spent = after`
    return (
        any(_both(notes, *ways) for ways in _UNDONE)
        or any(_is_said(_both(notes, *ways), data) for ways in _UNDONE_OF_FREE)
        or bool((_both(notes, ("masked",), _BITS) or notes["turned"]) and b"<<" in data)
        or any(re.search(rb"self\.%b = \w+(?:\n|\Z)" % head, data) for head in notes["head"])
        or _flagged(data, text)
        or _CUT_SPAN.search(data) is not None
        or (any(first in data for first in _FIRST_OF_ALL) and _WHOLE_AT_FIRST.search(data) is not None)
        or (text.has(b"next") and any(_RINGED.match(data, at) for _, at in places(b".next", data)))
        or any(b".%b += 1" % count in data for count in set(ending_before(b" -= 1", _USED, data)))
        or _put_back_by_name(notes["taken"], data)
        or _stated(data)
        or any({*pair} <= notes["raised"] and pair[0] != pair[1] for pair in _RECKONED.findall(data))
        or any(b" = self.%b\n" % mark in data for mark in kept)
        or any(name in notes["raised"] | notes["more"] for name in _SET_TOGETHER.findall(data))
        or (text.has(b"notify") and not _set_both_ways(data).isdisjoint(_WAITED_FOR.findall(data)))
    )


def _set_both_ways(data: bytes) -> set[bytes]:
    """`self.writing = True`, and `self.writing = False`."""
    return set(ending_before(b" = True", _OWN, data)) & set(ending_before(b" = False", _OWN, data))


def _stated(data: bytes) -> bool:
    """`cell.state = State.EMPTY`, and another state elsewhere, of which one is asked for."""
    said: Notes = defaultdict(set)
    for state in _STATED.finditer(data):
        start = data.rfind(b"\n", 0, state.start()) + 1
        field = _ANY_FIELD.search(data, start, state.start())
        field = field or (_OF_RECORD.search(data, start, state.start()) if state[1][:1].isalpha() else None)
        written = field is not None and state[1][:1] in b"\"'" and not field[0].endswith(b"]")
        if field and (not written or _OF_STATES.search(field[1])):
            said[field[1].decode()].add(state[1])
    return any(
        any(b"%b%b" % (asked, state) in data for asked in _ASKED for state in states)
        for states in said.values()
        if len(states) > 1
    )


def _put_back_by_name(taken: set[bytes], data: bytes) -> bool:
    """`resting = self.resting[key]`, `resting.append(thing)`"""
    return any(
        b" %b.%b(" % (local, way) in data
        for local in (_locals_of(taken, data) if taken else ())
        for way in (b"append", b"add", b"appendleft", b"put")
    )


def _locals_of(fields: set[bytes], data: bytes) -> set[bytes]:
    """Names given to one of these fields, or to something in it."""
    found = set()
    for start, at in places(_IS_FIELD, data):
        field = _LOOKED_INTO.match(data, at + len(_IS_FIELD))
        if field and field[1] in fields and (local := _LAST_WORD.search(data, start, at)):
            found.add(local[1])
    return found


def _shared_as_fields(text: Searched) -> bytes:
    """With the containers of classes and of the module written as those of an object; their names are still
    among the words of the text."""
    data = text.data.replace(b"type(self).", b"self.").replace(b"self.__class__.", b"self.")
    taken = {name for _, at in _all_places(data) if (name := _taken_at(data, at))} - _CALLERS_OWN
    own = _OF_THREAD if text.has(b"local()") else ()
    owners = {name for way in own for name in before(way, _LAST_WORD, data)}
    stores = _of_module(taken, data) | _of_closures(taken, data) if taken else set()
    stores |= set(_MODULES_OWN.findall(data)) if any(map(text.has, _STRIKING)) else set()
    shown = bool(owners or stores)
    if text.has(b"@classmethod") or text.has(b"@staticmethod"):
        owners |= {owner for owner in _classes(taken, data) if owner == b"cls" or b"class " + owner in data}
    for owner in sorted(owners):
        data = re.sub(_WHOLE % (owner, owner) + rb"\.", b"self.", data)
        if b"getattr(%b, " % owner in data:
            data = re.sub(rb"getattr\(%b, [\"'](\w+)[\"'][^()\n]*\)" % owner, rb"self.\1", data)
    for store in sorted(stores):
        data = re.sub(_WHOLE % (store, store) + rb"\b", b"self." + store, data)
    for helper, field in _SHOWING.findall(data) if shown else ():
        data = data.replace(helper + b"()", field)
    return data


def _classes(taken: set[bytes], data: bytes) -> Iterator[bytes]:
    """Of whose stores something is taken."""
    for start, at in _all_places(data):
        within = at + len(b"heappop(") if data.startswith(b"heappop(", at) else 0
        end = data.find(b")", within) if within else at
        if found := _OF_CLASS.search(data, within or start, end):
            yield found[1]
    for local in taken:
        if local + b" = " in data:
            yield from re.findall(_NAMED_OF_CLASS % (local, local), data)


def _of_module(taken: set[bytes], data: bytes) -> set[bytes]:
    """Names of the module of which something is taken, by themselves or under another."""
    found = {name for name in taken if _is_set_by_module(name, data)}
    for local in taken - found:
        roots = set(re.findall(_LOOKED_UP % (local, local), data)) if local + b" = " in data else set()
        found |= {root for root in roots if _is_set_by_module(root, data)}
    return found


def _of_closures(taken: set[bytes], data: bytes) -> set[bytes]:
    """Local names of a function that hands out two of its own functions: `return take, give`, `return
    Ring(take, give)`."""
    found = {name for name in taken if b"    %b = " % name in data}
    told = b" ".join(_HANDED_OUT.findall(data)) if found else b""
    handed = set(_NAME.findall(told))
    return found if sum(b"    def %b(" % name in data for name in handed) > 1 else set()


def _all_places(data: bytes) -> Iterator[tuple[int, int]]:
    return (place for needle in _TAKING for place in places(needle, data))


def _taken_at(data: bytes, at: int) -> bytes:
    """The name before `.pop` or `.get(`, or within `heappop()`."""
    if data.startswith(b"heappop(", at):
        within = _NAME.match(data, at + len(b"heappop("))
        return within[0] if within else b""
    before = _ANY_NAME.search(data, max(0, at - LONGEST), at)
    return before[1] if before else b""


def _is_set_by_module(name: bytes, data: bytes) -> bool:
    return b"\n%b = " % name in data or b"\n%b: " % name in data


def _notes(data: bytes, text: Searched) -> Notes:
    """The fields by what is done to them; heads of linked lists by themselves."""
    notes: Notes = defaultdict(set)
    for done in _DONE.finditer(data):
        notes[done.lastgroup or ""].add(done[1])
        if done["linked"]:
            notes["head"].update(_HEAD.findall(done["linked"]))
    for word, needle, way, name in _WRITTEN_OTHERWISE:
        if text.may_say(word):
            notes[way].update(_following(needle, name, data))
    for link in filter(text.has, _LINKS):
        notes["head"].update(_following(link + b" = self.", _HEAD, data))
    for local in _popped(data) if text.has(b"pop") else ():
        if local + b" = self." in data:
            notes["taken"].update(re.findall(_OF_FIELD % local, data))
        if local + b" in " in data:
            notes["taken"].update(re.findall(_OF_TURN % local, data))
    if text.has(b"heappush(") or text.has(b"insort"):
        notes["sorted"].update(re.findall(_INTO_ORDER, data))
    return notes


def _following(needle: bytes, name: re.Pattern[bytes], data: bytes) -> Iterator[bytes]:
    """The names that come right behind this needle."""
    for _, at in places(needle, data):
        if found := name.match(data, at + len(needle)):
            yield found[name.groups]


def _both(notes: Notes, done: tuple[str, ...], undone: tuple[str, ...]) -> set[bytes]:
    return {field for way in done for other in undone for field in notes[way] & notes[other]}


def _is_said(fields: set[bytes], data: bytes) -> bool:
    return bool(fields) and (b"range(" in data or any(map(_SAID.search, fields)))


def _popped(data: bytes) -> set[bytes]:
    """Local names of which something is taken; `kwargs` are the caller's words, and no store."""
    popping = places(b".pop", data)
    found = (_LOCAL.search(data, max(start, at - LONGEST), at) for start, at in popping)
    return {each[1] for each in found if each} - {b"kwargs"}


def _flagged(data: bytes, text: Searched) -> bool:
    """`worker.busy = True`, and `worker.busy = False`; `slot.owner = request`, and `slot.owner = None`;
    `slot.state = State.IDLE`."""
    flags = set(ending_before(b" = True", _FLAG, data))
    if flags and not flags.isdisjoint(ending_before(b" = False", _FLAG, data)):
        return True
    if text.may_say(_RESTING) and any(map(text.has, _SIGNS)) and _STATE.search(data):
        return True
    owners = set(ending_before(b" = None", _OWNED, data))
    return any(re.search(rb"\.%b = (?!None)" % owner, data) for owner in owners)

"""The names that a protocol's calls cannot do without: they choose files for the flow analysis."""

import re
from collections.abc import Iterable, Iterator

from auditor.protocols.protocol import Protocol
from auditor.source.clue import Clue

VERBS = (
    "alloc", "allocate", "malloc", "dealloc", "deallocate", "acquire", "obtain", "lease", "rent", "borrow",
    "checkout", "reserve", "unreserve", "pin", "unpin", "unlock", "incref", "decref", "free", "release",
    "recycle", "give_back", "put_back", "claim",
)  # fmt: skip
"""Verbs by which a class that defines both halves may be a pool; weaker ones need a pool's name too."""

_BRACKETS = re.compile(r"\[[^\]]*\]")
_WILD = re.compile(r"[*?.]+")


def clues(protocols: Iterable[Protocol]) -> tuple[Clue, ...]:
    """What files are recognised by while these protocols are in force."""
    found = [_called(verb) for verb in VERBS]
    found.append(Clue(b"Pool", rb"Pool(?![a-z0-9])\w*\s*[(:]"))  # defined or made; no Pooler, no MaxPool2d
    found.append(
        Clue(b"pool", rb"pool\w*\.(?:take|get|fetch|give|put|grab|pop)(?:_\w+)?\(")
    )  # weaker verbs, of a pool
    owned: dict[str, list[str]] = {}
    for owner, name in _owners_and_names(protocols):
        if owner:
            owned.setdefault(owner, []).append(re.escape(name))
        else:
            found.append(_called(name))
    found += [_called_on(owner, names) for owner, names in owned.items()]
    found += [_imported(*full) for full in _modules_and_names(protocols)]
    return tuple(dict.fromkeys(found))


def _owners_and_names(protocols: Iterable[Protocol]) -> Iterator[tuple[str, str]]:
    """`*[Pp]ool*.get_buffer(0)` asks for get_buffer, on something that has `ool` in it."""
    for protocol in protocols:
        for pattern in (*protocol.acquire, *protocol.release, *protocol.lease):
            owner, _, name = _BRACKETS.sub("*", pattern.text.partition("(")[0]).rpartition(".")
            word = max(_WILD.split(name.strip()), key=len)
            if word and not pattern.on_lease and not {word, *word.strip("_").split("_")} & set(VERBS):
                yield max(_WILD.split(owner), key=len), word


def _modules_and_names(protocols: Iterable[Protocol]) -> Iterator[tuple[str, str]]:
    """`urllib.request.urlopen` may be imported by its last name alone."""
    for protocol in protocols:
        for pattern in (*protocol.acquire, *protocol.lease):
            module, _, name = pattern.text.partition("(")[0].rpartition(".")
            if module and not re.search(r"[*?\[$]", module + name) and module not in ("self", "cls"):
                yield module, name


def _imported(module: str, name: str) -> Clue:
    names = rf"(?:\([^)]*|[^\n(]*)\b{re.escape(name)}\b"
    return Clue(name.encode(), rf"from\s+{re.escape(module)}\s+import\s+{names}".encode())


def _called_on(owner: str, names: Iterable[str]) -> Clue:
    pattern = rf"{re.escape(owner)}[\w.()\[\]]*\.(?:{'|'.join(names)})"
    return Clue(owner.encode(), pattern.encode())


def _called(name: str) -> Clue:
    """`name`, or a longer one with it between underscores: called, defined or taken from an object."""
    word = re.escape(name.encode())
    whole = rb"%b(?<![A-Za-z]%b)(?![a-z])" % (word, word)  # the literal first, or the search is slow
    return Clue(name.encode(), rb"%b(?:\w*\s*\(|(?<=\.%b))" % (whole, word), whole)

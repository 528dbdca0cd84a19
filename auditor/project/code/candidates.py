"""Which files and calls can matter at all, decided from text before anything is parsed."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from fnmatch import translate

from auditor.project.code.default_factories import names_of_factories
from auditor.project.code.in_threads import names_in_threads
from auditor.project.code.modules import Function, called_in
from auditor.project.code.spelled_out import names_behind
from auditor.protocols.vocabulary import (
    ACQUIRE_WORDS,
    RELEASE_WORDS,
    Name,
    pairs_with,
    some_undo_others,
    split,
    take_apart,
)
from auditor.source.both_ways import written_both_ways
from auditor.source.ended_elsewhere import ends_elsewhere
from auditor.source.searched import Searched

FEW = 40
"""So many names are looked for in a text one by one before all its calls are listed."""

ITERATORS = frozenset({"__iter__", "__aiter__"})

CLASS = re.compile(r"\n(?=class )")
CLASS_BODY = re.compile(r"^class [^\n]*\n(?:[ \t)][^\n]*\n|\n)*", re.MULTILINE)

DEFINITION = re.compile(r"def(?<!\wdef)[ \t]+(\w+)")  # a literal first: searched several times as fast


def may_define_pair(text: str) -> bool:
    """Whether the file has names that pair, or works on a field as pools do, be it that one class undoes what
    the other does."""
    return (
        names_pair(text)
        or names_undo(text)
        or may_have_shape(text)
        or may_end_elsewhere(text)
        or written_both_ways(text)
    )


def may_end_elsewhere(text: str) -> bool:
    """Whether one of its objects undoes what was done to another."""
    return ends_elsewhere(Searched(text.encode(errors="replace")))


def may_have_shape(text: str) -> bool:
    """Whether one of its classes works on a field both ways, or its functions on what the module has, or it
    has names of which one undoes another."""
    return any(
        written_both_ways(part) or names_undo(part) for part in (*CLASS.split(text), CLASS_BODY.sub("", text))
    )


def names_undo(text: str) -> bool:
    """Whether it defines functions of which one, by its name, undoes another."""
    return some_undo_others(set(DEFINITION.findall(text)))


def names_pair(text: str) -> bool:
    """Whether the file defines functions whose names could be two halves of a pair."""
    acquires: list[Name] = []
    releases: list[Name] = []
    for name in set(DEFINITION.findall(text)):
        acquiring = take_apart(name, ACQUIRE_WORDS)
        if acquiring is not None:
            acquires.append(acquiring)
        releasing = take_apart(name, RELEASE_WORDS)
        if releasing is not None:
            releases.append(releasing)
    return any(pairs_with(one, other) for one in acquires for other in releases)


class CalledNames:
    """Last names of everything that each file calls, found in its text once."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources
        self._names: dict[str, frozenset[str]] = {}

    def of(self, path: str) -> frozenset[str]:
        if path not in self._names:
            text = self.sources[path]
            behind = (*names_behind(text), *names_in_threads(text), *names_of_factories(text))
            self._names[path] = frozenset((*called_in(text), *behind))
        return self._names[path]

    def calling(self, paths: Iterable[str], words: Iterable[str]) -> Iterator[str]:
        """Those files that call something with one of these last names (`*` allowed)."""
        exact = {word for word in words if "*" not in word}
        wild = wild_pattern(words)
        if not exact and wild is None:
            return  # and no file is read
        few = exact if len(exact) <= FEW and wild is None else None
        for path in paths:
            if few is not None and path not in self._names:
                text = self.sources[path]
                if not any(map(text.__contains__, few)):
                    continue
            names = self.of(path)
            if not names.isdisjoint(exact) or (wild is not None and any(map(wild.fullmatch, names))):
                yield path

    def calling_of(self, paths: Iterable[str], words: Mapping[str, Set[str]]) -> Iterator[str]:
        """Those files that call something as the methods of one of these classes are called, and name the
        class, or what they ask so after it: `shelf.get(` of a `StagingShelf`."""
        for path in paths if words else ():
            text, names = self.sources[path], self.of(path)
            if any(
                cls in text
                or any(f"{word}.{name}(" in text for word in split(cls) for name in called & names)
                for cls, called in words.items()
                if not names.isdisjoint(called)
            ):
                yield path


def wild_pattern(words: Iterable[str]) -> re.Pattern[str] | None:
    parts = sorted(translate(word) for word in words if "*" in word and word.strip("*"))
    return re.compile("|".join(parts)) if parts else None


def called_as(function: Function, sources: Mapping[str, str]) -> set[str]:
    """Last names by which a function may be called: its own, aliases of imports, and names of the modules
    that hold it."""
    names = {function.name}
    if function.cls is not None and function.name in ITERATORS:
        names.add(function.cls.name)  # who makes such an object goes over it
    imported = re.compile(rf"\b{function.name}[ \t]+as[ \t]+(\w+)")
    for text in sources.values():
        if f"{function.name} as " in text:
            names.update(imported.findall(text))
    if function.cls is not None and function.name in ("forward", "__call__"):
        names |= _names_of_objects(function.cls.name, sources.values())
    return names


def _names_of_objects(cls: str, texts: Iterable[str]) -> set[str]:
    """`up` of `self.up = Linear(n)`, of `up: Linear`, and of `self.layer = up` the layer as well."""
    made = re.compile(rf"(\w+)[ \t]*(?::[^=\n]+)?=[ \t]*(?:\w+\.)*{cls}\(")
    said = re.compile(rf"\b(\w+)[ \t]*:[ \t]*(?:\w+\[)?[\"']?(?:\w+\.)*{cls}\b")
    names = set()
    for text in texts:
        if cls in text:
            told = set(said.findall(text))
            names |= {*made.findall(text), *told}
            names.update(*(re.findall(rf"\.(\w+) = {name}\b", text) for name in told))
    return names

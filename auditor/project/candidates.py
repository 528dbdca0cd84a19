"""Which files and calls can matter at all, decided from text before anything is parsed."""

import re
from collections.abc import Iterable, Iterator, Mapping

from auditor.project.modules import Function
from auditor.protocols.vocabulary import ACQUIRE_WORDS, RELEASE_WORDS, Name, pairs_with, take_apart

DEFINITION = re.compile(r"\bdef[ \t]+(\w+)")


def may_define_pair(text: str) -> bool:
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


def calling(sources: Mapping[str, str], words: Iterable[str]) -> Iterator[str]:
    """Paths of files that call something whose last name matches one of the words (`*` allowed)."""
    pattern = call_pattern(words)
    if pattern is None:
        return
    for path, text in sources.items():
        if pattern.search(text):
            yield path


def called_as(function: Function, sources: Mapping[str, str]) -> set[str]:
    """Last names by which a function may be called: its own, aliases of imports, and names of the modules that hold it."""
    names = {function.name}
    imported = re.compile(rf"\b{function.name}[ \t]+as[ \t]+(\w+)")
    made = None
    if function.cls is not None and function.name in ("forward", "__call__"):
        made = re.compile(rf"(\w+)[ \t]*(?::[^=\n]+)?=[ \t]*(?:\w+\.)*{function.cls.name}\(")
    for text in sources.values():
        if function.name in text:
            names.update(imported.findall(text))
        if made is not None and function.cls is not None and function.cls.name in text:
            names.update(made.findall(text))
    return names


def call_pattern(words: Iterable[str]) -> re.Pattern[str] | None:
    parts = sorted({re.escape(word).replace(r"\*", r"\w*") for word in words if word.strip("*")})
    return re.compile(r"(?:%s)[ \t]*\(" % "|".join(parts)) if parts else None

"""Writes the program of one pool in one use, as it leaks and as it is right.

A pool (`pools/NAME.py`) is code with a head: `# take:` and `# give:` are its two halves, written with P for
the pool and X for what was taken, `n` and `key` for the arguments of a use; `# gets:` says what taking gives
(`value`, `optional` for a value or None, `negative` for a number or -1, `answer` for True or False,
`nothing`); `# type:` is the class that a user is given, else Pool.

A use (`uses/NAME.txt`) is the methods of a class, indented by four after a first column: `-` marks the lines
that only the leaking one has, `+` those of the right one. `TAKE x else return` is an acquire that may fail,
`GIVE x` its release, `T` and `G x` are the bare expressions, `USE x` what was taken (`n` if it has no value).

A reach (`reaches/NAME.txt`) is how the user comes by the pool: `# P:` what it calls it, `# init:` the
parameter of its constructor, `# set:` what that does with it, `# base:` its base class, `# file:` where the
pool is, if not in the user's own file, and `# import:` how that is imported; and code that stands between
them, but for what follows a line `# in FILE:` and stands there, behind the pool if it is the pool's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

_HERE = Path(__file__).parent
_IMPORTS = """import asyncio
import contextlib
import functools
import threading
from collections import deque
from dataclasses import dataclass

"""
_TAKE = re.compile(r"( *)TAKE (\w+) else (.*)")
_GIVE = re.compile(r"\b(?:GIVE|G) ([\w.\[\]]+)")
_USE = re.compile(r"\bUSE ([\w.]+)")
_TAKEN = re.compile(r"\bT\b")
_FAILED = {"optional": "is None", "negative": "< 0"}
"""How it is asked whether a value is none."""


@dataclass(frozen=True)
class _Told:
    """A text with a head."""

    name: str
    text: str

    def head(self, word: str, otherwise: str = "") -> str:
        found = re.search(rf"^# {word}: (.*)$", self.text, re.MULTILINE)
        return found[1] if found else otherwise


@dataclass(frozen=True)
class Pool(_Told):
    """One way of keeping a stock, as somebody reaches it."""

    reached: str = "self.pool"

    @cached_property
    def take(self) -> str:
        return re.sub(r"\bP\b", self.reached, self.head("take"))

    def give(self, held: str) -> str:
        return re.sub(r"\bX\b", held, re.sub(r"\bP\b", self.reached, self.head("give")))

    @cached_property
    def awaited(self) -> bool:
        return "await " in self.take + self.give("x")

    @cached_property
    def gets(self) -> str:
        return self.head("gets", "value")

    @cached_property
    def has_value(self) -> bool:
        return self.gets in ("value", *_FAILED)

    @cached_property
    def type(self) -> str:
        return self.head("type", "Pool")


@dataclass(frozen=True)
class Use(_Told):
    """One way of holding what a pool gave."""

    def fits(self, pool: Pool) -> bool:
        """Not where there is nothing to hold, nor where a callback would have to await."""
        if pool.awaited and re.search(r"\blambda\b|^. {4,}def ", self.text, re.MULTILINE):
            return False
        return pool.has_value or not self.text.startswith("# needs a value")

    def methods(self, right: bool) -> str:
        kept = [
            line for line in self.text.splitlines() if line[:1] != "#" and line[:1] != ("-" if right else "+")
        ]
        return "\n".join(f"   {' ' + line[1:]}" if line else "" for line in kept)


@dataclass(frozen=True)
class Reach(_Told):
    """One way of coming by a pool."""

    def user(self, template: str) -> str:
        template = template.replace("self.pool = pool", self.head("set"))
        template = template.replace("pool: TYPE", self.head("init"))
        base = self.head("base")
        return template.replace("class User:", f"class User({base}):") if base else template

    @cached_property
    def between(self) -> str:
        """What stands between the pool and the user."""
        return re.sub(r"^# .*\n", "", self._parts[0], flags=re.MULTILINE)

    @cached_property
    def elsewhere(self) -> dict[str, str]:
        """What stands in other files, by their names."""
        return dict(zip(self._parts[1::2], self._parts[2::2], strict=True))

    @cached_property
    def _parts(self) -> list[str]:
        return re.split(r"^# in (\S+):\n", self.text, flags=re.MULTILINE)


def pools() -> list[Pool]:
    return [Pool(path.stem, path.read_text()) for path in sorted((_HERE / "pools").glob("*.py"))]


def uses() -> list[Use]:
    return [Use(path.stem, path.read_text()) for path in sorted((_HERE / "uses").glob("*.txt"))]


def reaches() -> list[Reach]:
    return [Reach(path.stem, path.read_text()) for path in sorted((_HERE / "reaches").glob("*.txt"))]


def reach(name: str) -> Reach:
    return Reach(name, (_HERE / "reaches" / f"{name}.txt").read_text())


def program(pool: Pool, use: Use, right: bool, by: Reach) -> dict[str, str]:
    """The texts of its files by their names."""
    pool = replace(pool, reached=by.head("P"))
    template = by.between + "\n\n" + by.user((_HERE / "user.txt").read_text()) + use.methods(right)
    methods = "\n".join(_lowered(pool, template.replace("TYPE", pool.type)))
    user = _awaiting(methods) if pool.awaited else methods
    if file := by.head("file"):
        texts = {name: text.replace("TYPE", pool.type) for name, text in by.elsewhere.items()}
        imports = by.head("import", f"from {Path(file).stem} import TYPE").replace("TYPE", pool.type)
        texts[file] = pool.text + texts.get(file, "")
        return {**texts, "m.py": f"{_IMPORTS}{imports}\n\n\n{user}\n"}
    return {"m.py": f"{_IMPORTS}{pool.text}\n{user}\n"}


def _lowered(pool: Pool, template: str) -> Iterator[str]:
    for line in template.splitlines():
        if found := _TAKE.fullmatch(line):
            yield from _taking(pool, *found.groups())
            continue
        line = _GIVE.sub(lambda given: pool.give(given[1]), line)
        line = _USE.sub(lambda used: used[1] if pool.has_value else "n", line)
        yield _TAKEN.sub(pool.take, line)


def _taking(pool: Pool, indent: str, name: str, failing: str) -> Iterator[str]:
    if pool.gets == "answer":
        yield f"{indent}if not {pool.take}:"
        yield f"{indent}    {failing}"
        return
    yield f"{indent}{name} = {pool.take}" if pool.has_value else indent + pool.take
    if pool.gets in _FAILED:
        yield f"{indent}if {name} {_FAILED[pool.gets]}:"
        yield f"{indent}    {failing}"


def _awaiting(methods: str) -> str:
    """What takes by `await` becomes a coroutine, and so does what calls one."""
    done: set[str] = set()
    while waiting := _waiting(methods) - done:
        for name in waiting:
            methods = re.sub(rf"^    def {name}\b", f"    async def {name}", methods, flags=re.MULTILINE)
            methods = re.sub(rf"(?<!await )\bself\.{name}\(", f"await self.{name}(", methods)
        done |= waiting
    methods = methods.replace("@contextlib.contextmanager", "@contextlib.asynccontextmanager")
    return re.sub(r"\b__(enter|exit)__", r"__a\1__", methods)


def _waiting(methods: str) -> set[str]:
    found = re.split(r"^    (?:async )?def ", methods, flags=re.MULTILINE)[1:]
    return {method.partition("(")[0] for method in found if "await " in method}

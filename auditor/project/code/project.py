"""The project's modules by dotted name, parsed only when something asks for them."""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from auditor.model import confession
from auditor.project.code.collect import read_module
from auditor.project.code.modules import Class, Function, Module
from auditor.source.newer_syntax import in_older_syntax
from auditor.source.parse import Parse

MANY_FILES = 64
"""So many files of one folder are looked through for what makes objects of a class of theirs."""

CALLED = re.compile(r"\.(\w++)\(")


class Project:
    """All sources, parsed on demand. `sources` maps paths with forward slashes to text."""

    def __init__(self, sources: Mapping[str, str], parse: Parse = ast.parse) -> None:
        self.sources = sources
        self._parse_text = parse
        self.failed: dict[str, tuple[int, str]] = {}
        self._modules: dict[str, Module | None] = {}
        self._by_suffix: dict[str, list[str]] | None = None
        self._callers: dict[str, list[str]] | None = None
        self._calling_both: dict[tuple[str, str], list[str]] = {}
        self._mentioning: dict[str, list[tuple[str, str]]] = {}
        self._by_folder: dict[str, list[str]] | None = None

    def module(self, path: str) -> Module | None:
        """The parsed module; None where it could not be parsed (noted in `failed`)."""
        if path not in self._modules:
            self._modules[path] = self._parse(path)
        return self._modules[path]

    @contextmanager
    def confessing(self, path: str, line: int = 0, cost: str = "") -> Iterator[None]:
        """A fault of ours inside costs what is done there alone, and is said of this file; of `WHOLE_TREE`
        where no file is to blame."""
        try:
            yield
        except Exception as error:
            self.failed.setdefault(path, (line, cost + confession(error)))

    def calling(self, method: str) -> list[str]:
        """The files that call a method of this name, by their text: all are gone over once, and every name
        that is called there is noted, which takes as long as looking for five of them."""
        if self._callers is None:
            self._callers = self._all_callers()
        return self._callers.get(method, [])

    def calling_both(self, method: str, other: str) -> list[str]:
        """Of those the files in whose text something of the other name is called too."""
        if (method, other) not in self._calling_both:
            found = [path for path in self.calling(method) if f"{other}(" in self.sources[path]]
            self._calling_both[method, other] = found
        return self._calling_both[method, other]

    def _all_callers(self) -> dict[str, list[str]]:
        callers: dict[str, list[str]] = {}
        for path, text in sorted(self.sources.items()):
            for name in set(CALLED.findall(text)):
                callers.setdefault(name, []).append(path)
        return callers

    def mentioning(self, word: str) -> list[tuple[str, str]]:
        """Files and their texts that have the word in them, parsed or not; each word is looked for once. A
        pattern over all texts takes ten times as long, and is asked for each field that holds a lease."""
        if word not in self._mentioning:
            found = [(path, text) for path, text in self.sources.items() if word in text]
            self._mentioning[word] = found
        return self._mentioning[word]

    def beside(self, module: Module, word: str) -> Iterator[Module]:
        """Other files of its folder, if they are not too many, that have the word in them."""
        if self._by_folder is None:
            self._by_folder = {}
            for path in sorted(self.sources):
                self._by_folder.setdefault(path.rpartition("/")[0], []).append(path)
        near = self._by_folder.get(module.path.rpartition("/")[0], [])
        for path in near if len(near) <= MANY_FILES else ():
            if path != module.path and word in self.sources[path]:
                other = self.module(path)
                if other is not None:
                    yield other

    def parsed(self) -> list[Module]:
        return [module for _, module in sorted(self._modules.items()) if module is not None]

    def _parse(self, path: str) -> Module | None:
        text = self.sources[path]
        try:
            return read_module(path, text, _syntax_tree(text, path, self._parse_text))
        except SyntaxError as error:
            self.failed[path] = (error.lineno or 0, f"invalid syntax: {error.msg}")
        except ValueError as error:
            self.failed[path] = (0, f"cannot be parsed: {error}")
        except (RecursionError, MemoryError):
            self.failed[path] = (0, "nested too deeply to be parsed")
        return None

    def find_module(self, dotted: str, importer: str) -> Module | None:
        """The project's file for a dotted module name; the one nearest to the importer if several end so."""
        path = self._nearest(dotted, importer)
        return self.module(path) if path is not None else None

    def _nearest(self, dotted: str, importer: str) -> str | None:
        if self._by_suffix is None:
            self._by_suffix = _suffixes(self.sources)
        paths = self._by_suffix.get(dotted, ())
        return max(paths, key=lambda path: (_shared_prefix(path, importer), -len(path), path), default=None)

    def lookup(self, dotted: str, importer: str, depth: int = 0) -> Function | Class | Module | None:
        """What a dotted name means, through packages, re-exports and aliases."""
        if depth > 8:
            return None
        whole = self.find_module(dotted, importer)
        if whole is not None:
            return whole
        parts = dotted.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module = self.find_module(".".join(parts[:cut]), importer)
            if module is not None:
                return self.member(module, parts[cut:], depth + 1)
        return None

    def member(self, module: Module, parts: list[str], depth: int = 0) -> Function | Class | Module | None:
        """`parts` as seen from inside a module."""
        qualname = ".".join(parts)
        found = module.classes.get(qualname) or module.functions.get(qualname)
        if found is not None:
            return found
        target = module.imports.get(parts[0])
        if target is not None:
            return self.lookup(".".join([target, *parts[1:]]), module.path, depth + 1)
        value = module.assigned.get(parts[0])
        if isinstance(value, (ast.Name, ast.Attribute)) and depth < 8:
            aliased = dotted_name(value)
            if aliased is not None and aliased[0] != parts[0]:
                return self.member(module, [*aliased, *parts[1:]], depth + 1)
        return self._through_stars(module, parts, depth) if module.stars and value is None else None

    def _through_stars(
        self, module: Module, parts: list[str], depth: int
    ) -> Function | Class | Module | None:
        """`from stomp.transport import *`; a file that never says the name is not read for it."""
        if depth > 8 or hasattr(builtins, parts[0]):
            return None
        for dotted in reversed(module.stars):
            path = self._nearest(dotted, module.path)
            if path is None or path == module.path or parts[0] not in self.sources[path]:
                continue
            there = self.module(path)
            found = self.member(there, parts, depth + 1) if there is not None else None
            if found is not None:
                return found
        return None

    def variable(self, module: Module, parts: list[str], depth: int = 0) -> tuple[Module, str] | None:
        """The module that assigns an imported name, and what it is there: `from .memory import host_pool`."""
        target = module.imports.get(parts[0])
        if target is None or depth > 8:
            return (module, parts[0]) if depth and len(parts) == 1 and parts[0] in module.assigned else None
        dotted = [*target.split("."), *parts[1:]]
        for cut in range(len(dotted) - 1, 0, -1):
            home = self.find_module(".".join(dotted[:cut]), module.path)
            if home is not None and home is not module:
                return self.variable(home, dotted[cut:], depth + 1)
        return None


def _syntax_tree(text: str, path: str, parse: Parse) -> ast.Module:
    try:
        return parse(text, path)
    except SyntaxError:
        older = in_older_syntax(text)
        if older is None:
            raise
        return parse(older, path)


def dotted_name(node: ast.expr) -> list[str] | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return [node.id, *reversed(parts)]


def _suffixes(paths: Iterable[str]) -> dict[str, list[str]]:
    """Every dotted name that a file could be imported by."""
    found: dict[str, list[str]] = {}
    for path in paths:
        parts = path.removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(path)
    return found


def _shared_prefix(path: str, other: str) -> int:
    count = 0
    for one, two in zip(path.split("/"), other.split("/"), strict=False):
        if one != two:
            break
        count += 1
    return count

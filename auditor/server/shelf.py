"""Parsed modules that outlive an audit: a text that has not changed is neither parsed nor lowered again."""

from collections.abc import Mapping
from dataclasses import dataclass

from auditor.project.code.modules import Module
from auditor.project.code.project import Project

Complaint = tuple[int, str]
"""The line of a syntax error, and what it says."""


@dataclass(frozen=True, slots=True)
class Shelved:
    text: str
    module: Module | None
    complaint: Complaint | None


class Shelf:
    """The last module of each path. A module holds its own flow graphs, which depend on its text alone."""

    def __init__(self) -> None:
        self._shelved: dict[str, Shelved] = {}

    def of(self, path: str, text: str) -> Shelved | None:
        shelved = self._shelved.get(path)
        return shelved if shelved is not None and shelved.text == text else None

    def keep(self, path: str, shelved: Shelved) -> None:
        self._shelved[path] = shelved


class KnownProject(Project):
    """A project that parses only what is not on the shelf."""

    def __init__(self, sources: Mapping[str, str], shelf: Shelf) -> None:
        super().__init__(sources)
        self._shelf = shelf

    @property
    def read(self) -> tuple[str, ...]:
        """The paths that something asked for."""
        return tuple(self._modules)

    def _parse(self, path: str) -> Module | None:
        text = self.sources[path]
        shelved = self._shelf.of(path, text)
        if shelved is None:
            module = super()._parse(path)
            self._shelf.keep(path, Shelved(text, module, self.failed.get(path)))
            return module
        if shelved.complaint is not None:
            self.failed[path] = shelved.complaint
        return shelved.module

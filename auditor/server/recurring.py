"""The flow analysis as a long-lived process repeats it: it can be left, and a glance can build on it."""

from collections.abc import Callable, Mapping, Sequence

from auditor.config import AnalysisSettings
from auditor.flow.knowledge import Knowledge
from auditor.project.analysis import Analysis
from auditor.project.code.candidates import may_define_pair
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.meaning.effects import FunctionEffects
from auditor.project.pools.discovery import discover
from auditor.project.pools.halves import Pair
from auditor.server.shelf import KnownProject, Shelf

Watch = Callable[[], None]
"""Called often; raises Outdated where nobody waits for the result any more."""


class Outdated(BaseException):
    """The text under analysis has changed. No fault of the code that it passes through: nothing stops it."""


class Recurring(Analysis):
    """Says the same as its base, and keeps what was discovered by file, and which words were looked for."""

    project: KnownProject

    def __init__(
        self,
        sources: Mapping[str, str],
        settings: AnalysisSettings,
        relevant: Sequence[str],
        shelf: Shelf,
        watch: Watch,
    ) -> None:
        self.shelf = shelf
        self.watch = watch
        self.pairs: dict[str, list[Pair]] = {}
        self.words: set[str] = set()
        super().__init__(sources, settings, relevant)

    def _opened(self, sources: Mapping[str, str]) -> Project:
        return KnownProject(sources, self.shelf)

    def _discover(self) -> list[Pair]:
        for path in self.relevant:
            self.pairs[path] = self._pairs_in(path)
        return [pair for pairs in self.pairs.values() for pair in pairs]

    def _pairs_in(self, path: str) -> list[Pair]:
        self.watch()
        module = self.project.module(path) if may_define_pair(self.project.sources[path]) else None
        return [] if module is None else list(discover(self.model, module))

    def _with_aliases(self, words: set[str]) -> set[str]:
        found = super()._with_aliases(words)
        self.words |= found
        return found

    def effects(self, function: Function) -> FunctionEffects:
        self.watch()
        return super().effects(function)

    def _known(self, function: Function) -> dict[int, Knowledge]:
        self.watch()
        return super()._known(function)

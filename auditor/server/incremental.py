"""The flow analysis of one folder, again and again: whole, or a glance at what was edited."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from auditor.config import AnalysisSettings
from auditor.examine import Analyse
from auditor.project.result import FlowResult
from auditor.server.edited import Edited
from auditor.server.glance import Glance
from auditor.server.recurring import Recurring, Watch
from auditor.server.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Basis:
    """The last whole analysis, and what it found."""

    analysis: Recurring
    flow: FlowResult


class Incremental:
    """Its methods stand in for `project.analysis.analyse`."""

    def __init__(self, watch: Watch) -> None:
        self.basis: Basis | None = None
        self._watch = watch
        self._shelf = Shelf()

    def fits(self, settings: AnalysisSettings) -> bool:
        """Whether a glance can build on an earlier analysis."""
        return self.basis is not None and self.basis.analysis.settings == settings

    def whole(
        self, sources: Mapping[str, str], settings: AnalysisSettings, relevant: Sequence[str]
    ) -> FlowResult:
        """What any audit finds. Raises Outdated; then the basis is still the one before."""
        analysis = Recurring(sources, settings, relevant, self._shelf, self._watch)
        flow = analysis.run()
        self.basis = Basis(analysis, flow)
        return flow

    def glance(self, open_files: Iterable[str]) -> Analyse:
        """An analysis that follows anew only the leases of those open files that have changed."""
        basis = self.basis
        assert basis is not None

        def analyse(
            sources: Mapping[str, str], settings: AnalysisSettings, relevant: Sequence[str]
        ) -> FlowResult:
            edited = Edited(sources, basis.analysis.project.sources, open_files)
            if not edited.changed:
                return basis.flow
            return Glance(basis.analysis, basis.flow, edited, frozenset(relevant)).run()

        return analyse

"""Passes of fixes until none is left: each is kept only if its finding is gone and no other one came."""

from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from auditor.arbitrate import ranks_below
from auditor.excerpts import text_at
from auditor.fingerprint import canonical
from auditor.fixes.apply import Fate, apply
from auditor.fixes.document import Document
from auditor.model import Failure, Finding
from auditor.source.load import lines_of

PASSES = 60
"""More than any file has fixes on top of one another; an end to it in any case."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the analysis says of the files as they are now. `given_up` counts, by path, the acquires it could
    not follow: a fix that makes a finding vanish that way has repaired nothing. `failures` are what went
    wrong on the way, fixes that could not be built among it."""

    findings: Sequence[Finding]
    given_up: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[Failure] = ()


Judge = Callable[[Mapping[str, Document]], Verdict]
"""Analyses the tree with these documents in the place of their files."""

Choose = Callable[[Finding, Mapping[str, Document]], str]
"""Why the finding's fix is not wanted; empty if it is."""


@dataclass(frozen=True, slots=True)
class Left:
    """A finding that stays, and why."""

    finding: Finding
    reason: str
    failed: bool = False  # it should have been fixed


@dataclass(frozen=True, slots=True)
class Repaired:
    """`documents` are the changed files, `together` the sets of paths that one fix changes, `failures` those
    of the analysis that judged last."""

    documents: Mapping[str, Document]
    fixed: tuple[Finding, ...]
    left: tuple[Left, ...]
    together: tuple[tuple[str, ...], ...]
    failures: tuple[Failure, ...] = ()


def repair(verdict: Verdict, files: Mapping[str, Document], judge: Judge, choose: Choose) -> Repaired:
    """Fix what `choose` wants of `verdict`'s findings. `files` holds every file that a fix may edit."""
    work = _Work(verdict, files, judge, choose)
    for _ in range(PASSES):
        if not work.one_pass():
            break
    return work.result()


@dataclass(frozen=True, slots=True)
class Identity:
    """A finding, whatever lines it is on: the same rule, function and code."""

    path: str
    symbol: str
    code: str
    text: str

    @property
    def kind(self) -> tuple[str, str, str]:
        """What is counted before and after: a fix may reword the code that a finding is about."""
        return self.path, self.symbol, self.code

    @property
    def acquire(self) -> tuple[str, str, str]:
        return self.path, self.symbol, self.text


class _Work:
    """The state between passes."""

    def __init__(self, verdict: Verdict, files: Mapping[str, Document], judge: Judge, choose: Choose) -> None:
        self.verdict, self.files, self.judge, self.choose = verdict, files, judge, choose
        self.changed: dict[str, Document] = {}
        self.fixed: list[Finding] = []
        self.dropped: dict[Identity, str] = {}
        self.together: list[tuple[str, ...]] = []
        self.one_by_one = False

    def one_pass(self) -> bool:
        """Apply what can go in together and is good; False if there was nothing to do."""
        here = self._current()
        wanted = [finding for finding in self.verdict.findings if self._is_wanted(finding, here)]
        wanted.sort(key=_innermost_first)
        if self.one_by_one:
            wanted = wanted[:1]
        if not wanted:
            return False
        while wanted:
            documents, accepted = self._apply(wanted, here)
            if not accepted:
                return bool(self.dropped)
            after = self.judge(self.changed | documents)
            suspects = self._suspects(accepted, after, documents)
            if not suspects:
                self._keep(documents, accepted, after)
                return True
            if len(suspects) == len(accepted) > 1:  # they cannot be told apart: then each by itself
                self.one_by_one = True
                return True
            self._drop(suspects)
            wanted = [finding for finding in accepted if finding not in suspects]
        return True

    def _is_wanted(self, finding: Finding, here: Mapping[str, Document]) -> bool:
        if finding.fix is None or self._identity(finding, here) in self.dropped:
            return False
        return not self.choose(finding, here)

    def _apply(
        self, wanted: Sequence[Finding], here: Mapping[str, Document]
    ) -> tuple[dict[str, Document], list[Finding]]:
        """The documents with what went in, and the findings that it is meant to repair."""
        result = apply([finding.fix for finding in wanted if finding.fix], here)
        accepted = []
        for finding, outcome in zip(wanted, result.outcomes, strict=True):
            if outcome.fate is Fate.APPLIED:
                accepted.append(finding)
            elif outcome.fate is Fate.REFUSED:
                self.dropped[self._identity(finding, here)] = outcome.reason
        return dict(result.documents), accepted

    def _suspects(
        self, accepted: Sequence[Finding], after: Verdict, documents: dict[str, Document]
    ) -> dict[Finding, str]:
        """The accepted fixes that did not help or did harm, and what is wrong with each."""
        here, there = self._current(), _over(self.files, self.changed | documents)
        mine = {finding: self._identity(finding, here) for finding in accepted}
        before = Counter(self._identity(finding, here).kind for finding in self.verdict.findings)
        expected = before - Counter(identity.kind for identity in mine.values())
        now = [self._identity(finding, there) for finding in after.findings]
        suspects: dict[Finding, str] = {}
        for kind in Counter(identity.kind for identity in now) - expected:
            still = [identity for identity in now if identity.kind == kind]
            alike = [finding for finding, identity in mine.items() if identity.kind == kind]
            if alike:
                same = [finding for finding in alike if mine[finding] in still]
                suspects |= dict.fromkeys(same or alike, "the finding would still be there")
            elif not all(any(_was_beneath(each, identity) for identity in mine.values()) for each in still):
                why = f"it would bring {still[0].code} in {still[0].symbol or still[0].path}"
                suspects |= dict.fromkeys(_closest(still[0], mine), why)
        for path, count in after.given_up.items():
            if count > self.verdict.given_up.get(path, 0):
                close = [finding for finding in accepted if path in _paths(finding)]
                suspects |= dict.fromkeys(
                    close or accepted, "the analysis could not follow the code any more"
                )
        return suspects

    def _keep(self, documents: Mapping[str, Document], accepted: list[Finding], after: Verdict) -> None:
        self.changed |= documents
        self.fixed += accepted
        self.together += [_paths(finding) for finding in accepted]
        self.verdict = after
        self.one_by_one = False

    def _drop(self, suspects: Mapping[Finding, str]) -> None:
        here = self._current()
        self.dropped |= {self._identity(finding, here): why for finding, why in suspects.items()}

    def result(self) -> Repaired:
        here = self._current()
        left = []
        for finding in self.verdict.findings:
            failure = self.dropped.get(self._identity(finding, here))
            reason = failure or self._reason(finding, here)
            left.append(Left(finding, reason, failure is not None))
        failures = tuple(self.verdict.failures)
        return Repaired(dict(self.changed), tuple(self.fixed), tuple(left), tuple(self.together), failures)

    def _reason(self, finding: Finding, here: Mapping[str, Document]) -> str:
        if finding.fix is None:
            return f"no fix could be built: {finding.unfixed}" if finding.unfixed else "no fix could be built"
        return self.choose(finding, here) or "too many passes"

    def _current(self) -> Mapping[str, Document]:
        return _over(self.files, self.changed)

    def _identity(self, finding: Finding, documents: Mapping[str, Document]) -> Identity:
        document = documents.get(finding.span.path)
        text = canonical(text_at(finding.span, lines_of(document.text))) if document else ""
        return Identity(finding.span.path, finding.symbol, finding.code, text)


def _over(files: Mapping[str, Document], changed: Mapping[str, Document]) -> Mapping[str, Document]:
    """`files`, with `changed` in front of them; files are read only when one is asked for."""
    return ChainMap(dict(changed), files)  # type: ignore[arg-type]  # only the first is ever written to


def _was_beneath(extra: Identity, repaired: Identity) -> bool:
    """An acquire shows its gravest fault only: with that repaired, the next one comes to light."""
    return extra.acquire == repaired.acquire and ranks_below(extra.code, repaired.code)


def _closest(extra: Identity, accepted: Mapping[Finding, Identity]) -> list[Finding]:
    """The fixes that most likely brought `extra`: of its function, else of its file, else all."""
    same_file = [finding for finding in accepted if extra.path in _paths(finding)]
    same_symbol = [finding for finding in same_file if accepted[finding].symbol == extra.symbol]
    return same_symbol or same_file or list(accepted)


def _innermost_first(finding: Finding) -> tuple[str, str, int]:
    """Within a function the later acquire first: its life lies within that of the earlier."""
    return finding.span.path, finding.symbol, -finding.span.line


def _paths(finding: Finding) -> tuple[str, ...]:
    return tuple(dict.fromkeys(edit.span.path for edit in finding.fix.edits)) if finding.fix else ()

"""A first answer about the files that were just edited: of the others it believes what it knew."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import chain

from auditor.model import Failure
from auditor.project.adoption.pool_call import PoolCall
from auditor.project.adoption.usage import Usage
from auditor.project.code.aliases import other_names
from auditor.project.code.candidates import called_as
from auditor.project.code.modules import Class, Function, Module
from auditor.project.code.project import Project
from auditor.project.fields.fields import Fields
from auditor.project.idle.losses import with_idle
from auditor.project.leases.openers import keep_lost, made_as
from auditor.project.meaning.contexts import words_of
from auditor.project.meaning.customary import customary
from auditor.project.outcome import Outcome
from auditor.project.pools.halves import Pair
from auditor.project.result import FlowResult
from auditor.server.edited import Edited
from auditor.server.recurring import Recurring


class Glance(Recurring):
    """Follows the leases of the files in `focus` alone, over what a whole analysis learned of the others.

    What an edit does to leases in other files is left to the next whole analysis."""

    def __init__(self, basis: Recurring, flow: FlowResult, edited: Edited, relevant: Set[str]) -> None:
        self.basis = basis
        self.flow = flow
        self.focus = edited.changed
        everywhere = {path for path in basis.relevant if path not in self.focus} | (relevant & self.focus)
        super().__init__(edited, basis.settings, sorted(everywhere), basis.shelf, basis.watch)
        self.relevant = sorted(relevant & self.focus)

    def _discover(self) -> list[Pair]:
        for path in self.relevant:
            known = self.basis.pairs.get(path)
            still = known is not None and path not in self.focus and all(map(self._holds, known))
            self.pairs[path] = known if known is not None and still else self._pairs_in(path)
        return [pair for pairs in self.pairs.values() for pair in pairs]

    def _holds(self, pair: Pair) -> bool:
        return all(self._current(half.function) for half in (*pair.acquires, *pair.releases))

    def _is_current(self, cls: Class) -> bool:
        return self.project.module(cls.module.path) is cls.module

    def _current(self, function: Function) -> bool:
        return self.project.module(function.module.path) is function.module

    def run(self) -> FlowResult:
        for path in (*self.basis.project.read, *sorted(self.focus)):
            if path in self.project.sources:
                self.project.module(path)
        self.calls.index_names(f for module in self.project.parsed() for f in module.by_node.values())
        self._inherit()
        words = self.recogniser.words | made_as(self.recogniser.openers, self.model) | self.basis.words
        words |= words_of(self.recogniser.contexts)
        words = self._with_aliases(words)
        self._wave(sorted(self.called.calling(self.focus, words)), words)
        keep_lost(self.outcomes)
        return self._merged()

    def _inherit(self) -> None:
        """What callers and callees in other files were found to do."""
        self._other_names = {name: set(also) for name, also in self.basis._other_names.items()}
        for word, names in other_names(self.project.sources, self.focus).items():
            self._other_names.setdefault(word, set()).update(names)
        wrappers = self.basis.recogniser.wrappers
        self.recogniser.wrappers.update((f, wrappers[f]) for f in wrappers if self._current(f))
        openers = self.basis.recogniser.openers
        self.recogniser.add_openers({c: o for c, o in openers.items() if self._is_current(c)})
        contexts = map(self._counterpart, self.basis.recogniser.contexts)
        self.recogniser.contexts = {function for function in contexts if function is not None}
        for function, outcomes in self.basis.received.items():
            elsewhere = [each for each in outcomes if self._current(each.function)]
            now = self._counterpart(function)
            if now is not None and elsewhere:
                self.received[now] = elsewhere

    def _counterpart(self, function: Function) -> Function | None:
        module = self.project.module(function.module.path)
        if module is None or module is function.module:
            return function if module else None
        cls = module.classes.get(function.cls.qualname) if function.cls is not None else None
        named = cls.methods if cls is not None else module.functions
        return named.get(function.name if cls is not None else function.qualname)

    def _wave(self, paths: list[str], words: set[str]) -> None:
        """As the whole analysis does it, within the focus."""
        texts = {path: self.project.sources[path] for path in self.focus}
        while words:
            before = set(self.recogniser.wrappers)
            for path in paths:
                self._follow_in(path, words)
            fresh = self._found_since(before)
            words = self._with_aliases(set().union(*(called_as(function, texts) for function in fresh)))
            paths = sorted(self.called.calling(self.focus, words))

    # Results ------------------------------------------------------------------------------------------------

    def _merged(self) -> FlowResult:
        """The last whole result, but for what is said of the files in focus."""
        old = self.flow
        outcomes = sorted(self.outcomes.values(), key=lambda outcome: outcome.lease.span)
        fields = Fields(self.project, self.summaries, self.effects, self.recogniser).stored(outcomes)
        kept = [lease for lease in old.leases if lease.span.path not in self.focus]
        custom = customary(chain(kept, (outcome.lease for outcome in outcomes)), self._lines)
        decided = [self._decided(outcome, fields.get(id(outcome.call), ()), custom) for outcome in outcomes]
        leases = with_idle(self.model, self.relevant, decided, self.recogniser.lending((*kept, *decided)))
        misuses = [each for each in old.misuses if each.span.path not in self.focus]
        misuses += self._misuses(outcomes)
        failed = (Failure(path, line, text) for path, (line, text) in sorted(self.project.failed.items()))
        return replace(
            old,
            leases=tuple(sorted((*kept, *leases), key=lambda lease: lease.span)),
            misuses=tuple(sorted(misuses, key=lambda each: (each.span, each.fault))),
            failures=tuple(failed),
            pool_calls=self._pool_calls(outcomes),
        )

    def _pool_calls(self, outcomes: Sequence[Outcome]) -> tuple[PoolCall, ...]:
        kept = [call for call in self.flow.pool_calls if call.span.path not in self.focus]
        new = Usage(_Part(self.project, self.focus), self.recogniser, outcomes).pool_calls()
        return tuple(sorted((*kept, *new), key=lambda call: (call.span, call.releases)))


class _Part(Project):
    """Some modules of a project."""

    def __init__(self, whole: Project, paths: Iterable[str]) -> None:
        super().__init__(whole.sources)
        self._part = [module for path in paths if (module := whole.module(path)) is not None]

    def parsed(self) -> list[Module]:
        return self._part

"""The flow analysis of a whole project: sources in, decided leases out."""

import ast
import gc
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import reduce

from auditor.config import AnalysisSettings
from auditor.flow.effects import Handle
from auditor.flow.knowledge import Knowledge
from auditor.flow.lease import GivingBack, Lease, StoredField
from auditor.flow.limits import TooManyStates
from auditor.flow.misuse import Misuse
from auditor.ir.graph import TooLarge
from auditor.model import WHOLE_TREE, Failure
from auditor.project.adoption.usage import Usage
from auditor.project.code.aliases import other_names
from auditor.project.code.bindings import TEST_FILE
from auditor.project.code.calls import Calls
from auditor.project.code.candidates import CalledNames, called_as, may_define_pair
from auditor.project.code.class_model import ClassModel
from auditor.project.code.given_functions import names_given
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.families import Families
from auditor.project.fields.fields import Fields, is_seen_to
from auditor.project.fields.forgetting import for_good
from auditor.project.fields.handed_on import handed_on
from auditor.project.fields.taken_again import told_how_taken, told_where_it_was_put
from auditor.project.idle.losses import with_idle
from auditor.project.leases.belief import ENOUGH, disbelieved, is_clearly_none
from auditor.project.leases.brought_to_contexts import brought_to_contexts, told_where_it_was_taken
from auditor.project.leases.closed_early import closed_by_consumers
from auditor.project.leases.closed_here import closed_here
from auditor.project.leases.detached import note_detaching
from auditor.project.leases.filled import note_filled
from auditor.project.leases.filled_at_first import told_of_what_is_put_over
from auditor.project.leases.gaps import told_of_gaps
from auditor.project.leases.held_over import ended_by_callers, note_held_over
from auditor.project.leases.leases import Follower
from auditor.project.leases.left_to_others import lost_by_who_has_it
from auditor.project.leases.left_to_the_idle import LeftToTheIdle
from auditor.project.leases.never_ended import NeverEnded
from auditor.project.leases.once_each import told_of_repeats
from auditor.project.leases.openers import keep_lost, made_as, openers, without_kept
from auditor.project.leases.out_of_tables import out_of_tables
from auditor.project.leases.received import callers_of
from auditor.project.leases.second_hand import (
    believe_receivers,
    moves_things,
    of_a_proposed_pair,
    second_hands,
    without_exceptional,
)
from auditor.project.leases.seen_as_methods import Found, as_methods, told_as_functions
from auditor.project.leases.shown_again import keep_what_is_shown
from auditor.project.leases.wrapping import in_other_cases, lists_what_it_counts, told_otherwise, wraps
from auditor.project.meaning.contexts import ENTERING, entering_methods, words_of
from auditor.project.meaning.customary import customary
from auditor.project.meaning.effects import FunctionEffects
from auditor.project.meaning.giving_back import giving_back, returns_several
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import acquires, functions_with
from auditor.project.meaning.source import Source
from auditor.project.meaning.summaries import Summaries
from auditor.project.meaning.told_ends import ToldEnds
from auditor.project.misuse.misused import Misused
from auditor.project.misuse.uses import Endings
from auditor.project.outcome import Outcome, lie_apart, loses_normally, merged_outcome
from auditor.project.pools.discovery import discover
from auditor.project.pools.halves import Pair
from auditor.project.pools.implementing import with_implementations
from auditor.project.result import FlowResult
from auditor.protocols.load import in_force
from auditor.source.parse import Parse


def analyse(
    sources: Mapping[str, str], settings: AnalysisSettings, relevant: Sequence[str] | None = None,
    parse: Parse = ast.parse,
) -> FlowResult:  # fmt: skip
    """Decide the life of every acquire in `sources` (path relative to the working directory -> text).

    `relevant` are the files that may define or use a pool (all, if not given); the others are read only
    when a call or an import leads there, or when they call a function that turns out to return a lease."""
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are large and free of cycles: collecting doubles the time
    try:
        return Analysis(sources, settings, relevant, parse).run()
    finally:
        if collecting:
            gc.enable()


class Analysis:
    """One run. Sites are found in waves: a function that returns a lease makes its callers acquire."""

    def __init__(
        self, sources: Mapping[str, str], settings: AnalysisSettings, relevant: Sequence[str] | None = None,
        parse: Parse = ast.parse,
    ) -> None:  # fmt: skip
        self.parse = parse
        self.relevant = sorted(sources if relevant is None else relevant)
        self.called = CalledNames(sources)
        self.settings = settings
        self.project = self._opened(sources)
        self.model = ClassModel(self.project)
        self.calls = Calls(self.model)
        self.recogniser = Recogniser(self.calls, in_force(settings), self._discover())
        self.summaries = Summaries(self.calls, self.effects)
        self.never_ended = NeverEnded(self.recogniser, sources)
        self.left_to_the_idle = LeftToTheIdle(self.model)
        self.outcomes: dict[int, Outcome] = {}
        self.received: dict[Function, list[Outcome]] = {}  # leases that callers got from each function
        self.unfollowed: list[Failure] = []
        self._other_names: dict[str, set[str]] = {}
        self._counted: list[tuple[Function, Source, Outcome]] = []
        self._effects: dict[Function, FunctionEffects] = {}
        self._told_ends = ToldEnds(self.recogniser)
        self._followers: dict[Function, Follower] = {}
        self._users: dict[str, list[Outcome]] = {}  # of the pairs that are only proposed
        self._none: set[str] = set()  # those of which nobody else need be asked
        self._to_come: set[str] = set()  # tests, which are not asked and wait for what the others say
        self._asked = False
        self._handed_on: frozenset[Function] = frozenset()  # methods that take out of a container for callers
        self._again: set[Function] = set()  # wrappers of which more was found since their callers were asked
        self._returned_at: dict[Function, frozenset[int]] = {}  # ways out with a wrapper's first lease

    def effects(self, function: Function) -> FunctionEffects:
        if function not in self._effects:
            known = self.recogniser, self.summaries, self._told_ends
            self._effects[function] = FunctionEffects(function, *known)
        return self._effects[function]

    def _opened(self, sources: Mapping[str, str]) -> Project:
        return Project(sources, self.parse)

    def _discover(self) -> list[Pair]:
        pairs: list[Pair] = []
        for path in self.relevant:
            if may_define_pair(self.project.sources[path]) and (module := self.project.module(path)):
                with self.project.confessing(path, cost="not searched for pools: "):
                    try:
                        pairs += discover(self.model, module)
                    except RecursionError:
                        self.project.failed[path] = (0, "not searched for pools: nested too deeply")
        return with_implementations(self.model, pairs)

    def run(self) -> FlowResult:
        self._other_names = other_names(self.project.sources, self.relevant)
        made = {factory.name for factory in self.model.factories}
        given = names_given(made, self.project.sources)
        words = self._with_aliases(self.recogniser.words) | given
        unforeseen = self.called.calling(self.project.sources, self.recogniser.unforeseen | given)
        named = self.called.calling_of(self.project.sources, self.recogniser.common_names)
        paths = sorted({*self._calling(words), *unforeseen, *named})
        for path in paths:
            self.project.module(path)
        self.calls.index_names(f for module in self.project.parsed() for f in module.by_node.values())
        self._wave(paths, words)
        self._ask_users()
        self._wave(sorted(self._to_come), words)
        self._guarded("leases that come out of queues", self._follow_second_hands)
        self._guarded("leases that come out of containers", self._follow_what_comes_out)
        self._guarded("objects that hold something open", self._follow_openers)
        self._guarded("leases that are lent on", self._follow_what_is_lent)
        self._guarded("what is closed by who opened it", self._follow_what_is_closed)
        return self._result()

    def _guarded(self, what: str, phase: Callable[[], None]) -> None:
        """A fault of ours that no file can be blamed for costs this phase, and is said."""
        with self.project.confessing(WHOLE_TREE, cost=f"{what} not followed: "):
            phase()

    def _ask_users(self) -> None:
        """About the pairs that are only proposed. What is none may still hand on what another lends."""
        none = disbelieved(self.recogniser, self.outcomes.values()) | self._none
        self._asked = True
        if not none:
            return
        asked = {at for at, (pair, _) in self.recogniser.acquiring.items() if pair.name in none}
        self.recogniser.forget(none)
        self.outcomes = {
            at: each for at, each in self.outcomes.items() if each.acquisition.protocol not in none
        }
        self._counted = [each for each in self._counted if each[1].protocol not in none]
        for function, received in self.received.items():
            self.received[function] = [each for each in received if each.acquisition.protocol not in none]
        self._effects.clear()  # they remember what was taken for an acquire
        self._told_ends = ToldEnds(self.recogniser)
        self._followers.clear()
        self._follow_what_is_handed_on(asked)

    def _follow_what_is_handed_on(self, by: Set[Function]) -> None:
        """By functions that were taken for halves of pairs."""
        for outcome in [each for each in self.outcomes.values() if each.function in by]:
            source = self.recogniser.source(outcome.function, outcome.call)
            if source is not None and outcome.returned is not None:
                self._note_wrapper(outcome.function, source, outcome)
        words, paths = self._callers_of(by & self.recogniser.wrappers.keys())
        self._wave(paths, words)

    def _follow_second_hands(self) -> None:
        """What comes out of queues that others fill; who gets it from there hands it on like a wrapper."""
        found_before = set(self.recogniser.wrappers)
        for function, its, outcome in self._counted:
            if function not in found_before:
                self._note_wrapper(function, its, outcome)
        for function, call, source in list(second_hands(self.recogniser)):
            if id(call) not in self.outcomes and call not in self.recogniser.second_hand:
                self.recogniser.second_hand[call] = source
                self._follow(function, call, source)
        words, paths = self._callers_of(set(self.recogniser.wrappers) - found_before)
        self._wave(paths, words)

    def _follow_what_comes_out(self) -> None:
        """Of containers, by methods that return the entry they take out: their callers have it then."""
        asked = Families(self.project, self.summaries, self.effects, self.recogniser)
        known = self.recogniser.wrappers.keys() | self.recogniser.acquiring.keys()
        found = {
            method: source
            for outcome in self._in_order()
            for method, source in handed_on(asked, outcome)
            if method not in known
        }
        self.recogniser.wrappers.update(found)
        self._handed_on = frozenset(found)
        words, paths = self._callers_of(set(found))
        self._wave(paths, words)

    def _follow_openers(self) -> None:
        """What the fields of a class hold open its objects hold open; so do holders of such objects."""
        lending = {each.function for each in self.outcomes.values() if each.lease.in_context_manager}
        self.recogniser.contexts = lending
        self._wave(sorted(self.called.calling(self.project.sources, ENTERING)), words_of(lending))
        outcomes, pools = self.outcomes.values(), self.recogniser.pools
        ending = self.recogniser.ending_names
        while (
            found := openers(outcomes, self.model, self.summaries, pools, ending)
        ) != self.recogniser.openers:
            self.recogniser.add_openers(found)
            entered = entering_methods(found.values())
            self.recogniser.contexts = lending | entered
            words = self._with_aliases(made_as(found, self.model)) | words_of(entered)
            self._wave(sorted(self.called.calling(self.project.sources, words)), words)
        keep_lost(self.outcomes)

    def _follow_what_is_lent(self) -> None:
        """To functions that have only borrowed what somebody else gave them: who gives it back afterwards
        knows that they do not keep it."""
        borrowers = frozenset(each for follower in self._followers.values() for each in follower.lent())
        self.recogniser.borrowers = borrowers
        found_before = set(self.recogniser.wrappers)
        for outcome in self._in_order() if borrowers else ():
            source = self.recogniser.source(outcome.function, outcome.call)
            if outcome.unknown and source is not None:
                for received in self.received.values():
                    received[:] = [each for each in received if each.call is not outcome.call]
                self._follow(outcome.function, outcome.call, source)
        words, paths = self._callers_of(self._found_since(found_before))
        self._wave(paths, words)

    def _follow_what_is_closed(self) -> None:
        """By the function that opened it: what that does not lose otherwise, nobody asked about."""
        for function, call, source in list(closed_here(self.recogniser)):
            if id(call) not in self.outcomes:
                self.recogniser.second_hand[call] = source
                self._follow(function, call, source)
                outcome = self.outcomes.get(id(call))
                if outcome is None or not loses_normally(outcome.lease):
                    self.outcomes.pop(id(call), None)
                    del self.recogniser.second_hand[call]
                    for received in self.received.values():
                        received[:] = [each for each in received if each.call is not call]

    def _with_aliases(self, words: set[str]) -> set[str]:
        return words.union(*(self._other_names[word] for word in words & self._other_names.keys()))

    def _wave(self, paths: list[str], words: set[str]) -> None:
        """Follow the acquires among calls of these names; callers of what turns out to return a lease come
        next."""
        while words:
            found_before = set(self.recogniser.wrappers)
            for path in paths:
                self._follow_in(path, words)
            words, paths = self._callers_of(self._found_since(found_before))

    def _found_since(self, before: set[Function]) -> set[Function]:
        """Wrappers that are new, or of which more was found."""
        again, self._again = self._again, set()
        return (set(self.recogniser.wrappers) - before) | again

    def _callers_of(self, fresh: set[Function]) -> tuple[set[str], list[str]]:
        """By which names, and in which files, they may be called."""
        words = set().union(*(called_as(function, self.project.sources) for function in fresh))
        words = self._with_aliases(words)
        return words, sorted(self.called.calling(self.project.sources, words))

    def _follow_in(self, path: str, words: set[str]) -> None:
        module = self.project.module(path)
        if module is None:
            return
        for function, calls in functions_with(module, words):
            for call, source in acquires(self.recogniser, function, calls):
                if id(call) in self.outcomes or source.protocol in self._none:
                    continue
                if source.proposed and not self._asked and TEST_FILE.search(path):
                    self._to_come.add(path)
                    continue
                self._follow(function, call, source)

    def _outcomes_of(self, function: Function, call: ast.Call, source: Source) -> list[Outcome]:
        """Of each lease that the call starts; none where it cannot be reached, or is not followed."""
        with self.project.confessing(function.module.path, call.lineno):
            try:
                follower = self._follower(function)
                found = [follower.outcome(call), *(follower.outcome(call, other) for other in source.also)]
                return [outcome for outcome in found if outcome is not None]
            except (TooLarge, TooManyStates, RecursionError) as error:
                why = {TooLarge: "the function is too large", TooManyStates: "too many ways to hold it"}
                reason = why.get(type(error), "nested too deeply")
                self.unfollowed.append(Failure(function.module.path, call.lineno, f"not followed: {reason}"))
        return []

    def _follow(self, function: Function, call: ast.Call, source: Source) -> None:
        reached = self._outcomes_of(function, call, source)
        if source.second_hand:
            reached = [without_exceptional(outcome) for outcome in reached]
        elif source.proposed:
            reached = [of_a_proposed_pair(each, closing=True, moved=True) for each in reached]  # see _result
        for outcome, its in zip(reached, (source, *source.also), strict=False):
            if outcome.returned is not None and not function.is_context_manager:
                if lists_what_it_counts(outcome):
                    self._counted.append((function, its, outcome))  # what else it returns is noted first
                else:
                    self._note_wrapper(function, its, outcome)
            else:
                note_filled(self.recogniser, its, outcome)
                note_held_over(self.recogniser, its, outcome)
            note_detaching(self.recogniser, its, outcome)
        if not reached:
            return
        self.outcomes[id(call)] = outcome = reduce(merged_outcome, reached[1:], replace(reached[0]))
        if source.proposed:
            self._note_user(source.protocol, outcome)
        for target in self.calls.targets(function, call)[0]:
            self.received.setdefault(target, []).extend(reached)

    def _note_user(self, pair: str, outcome: Outcome) -> None:
        users = self._users.setdefault(pair, [])
        users.append(outcome)
        if len(users) % ENOUGH == 0 and is_clearly_none(self.recogniser, users):
            self._none.add(pair)

    def _follower(self, function: Function) -> Follower:
        if function not in self._followers:
            self._followers[function] = Follower(function, self.effects(function), self.settings.exceptions)
        return self._followers[function]

    def _note_wrapper(self, function: Function, source: Source, outcome: Outcome) -> None:
        made = wraps(self.recogniser, function, source, outcome)
        if made is None:
            return
        first = self.recogniser.wrappers.get(function)
        if first is None or first.handle is not Handle.RESULT:  # a permit goes with what is returned
            self.recogniser.wrappers[function] = made
            self._returned_at[function] = outcome.returned_at
            return
        made = in_other_cases(made, first)
        if self._beside(function, outcome, made, first) or told_otherwise(made, first):
            self.recogniser.wrappers[function] = replace(first, also=(*first.also, made))
            for each in self.received.pop(function, ()):  # they are asked again, about both
                self.outcomes.pop(id(each.call), None)
            self._again.add(function)

    def _beside(self, function: Function, outcome: Outcome, made: Source, first: Source) -> bool:
        """Whether one way out returns both, in places of their own."""
        together = outcome.returned_at & self._returned_at.get(function, frozenset())
        return bool(together) and all(lie_apart(made.rest, other.rest) for other in (first, *first.also))

    # Results ------------------------------------------------------------------------------------------------

    def _result(self) -> FlowResult:
        believe_receivers(self.outcomes, self.received, self.recogniser, self._handed_on)
        keep_what_is_shown(self.recogniser, self.outcomes, self.received)
        asked = Fields(self.project, self.summaries, self.effects, self.recogniser)
        fields = asked.stored(self._in_order())
        self.outcomes = without_kept(self.outcomes, fields)
        fields = told_how_taken(asked.takings, fields, self.outcomes, self._follow_taking)
        self._guarded("leases in tables", lambda: self._follow_out_of_tables(fields))
        self._guarded("shared leases", lambda: fields.update(self._shared_fields(asked, fields)))
        self._guarded("leases of contexts", lambda: fields.update(self._fields_of_contexts(asked, fields)))
        outcomes = [
            ended_by_callers(each, self.received.get(each.function, ()), self.calls)
            for each in self._in_order()
        ]
        outcomes = [told_of_gaps(each) for each in closed_by_consumers(outcomes, self.calls)]
        pairs = {pair.name: pair for pair, _ in self.recogniser.acquiring.values() if pair.proposed}
        moved = {name: moves_things(pair) for name, pair in pairs.items()}
        outcomes = [
            of_a_proposed_pair(each, closing=False, moved=moved[name]) if name in moved else each
            for name, each in ((each.acquisition.protocol, each) for each in outcomes)
        ]
        outcomes = [told_of_repeats(each, self.calls) for each in outcomes]
        outcomes = [self._left_to_others(each) for each in told_of_what_is_put_over(outcomes)]
        custom = customary((outcome.lease for outcome in outcomes), self._lines)
        decided = [self._decided(outcome, fields.get(id(outcome.call), ()), custom) for outcome in outcomes]
        leases = with_idle(self.model, self.relevant, decided, self.recogniser.lending(decided))
        unknown = [
            Failure(o.lease.span.path, o.lease.span.line, f"not followed to its end: {o.lease.text}")
            for o in outcomes
            if o.unknown and not o.lease.leaks
        ]
        usage = Usage(self.project, self.recogniser, outcomes)
        misuses = self._misuses(outcomes)  # which may fail in files, too
        return FlowResult(
            leases=leases,
            protocols=usage.protocols(),
            acquires=len(leases) + len(self.unfollowed),
            followed=len(leases) - len(unknown),
            acquire_names=usage.acquire_names(),
            release_names=usage.release_names(),
            failures=tuple(Failure(file, at, why) for file, (at, why) in sorted(self.project.failed.items())),
            unfollowed=tuple(sorted((*self.unfollowed, *unknown), key=lambda f: (f.path, f.line))),
            pool_calls=usage.pool_calls(),
            misuses=misuses,
        )

    def _in_order(self) -> list[Outcome]:
        return sorted(self.outcomes.values(), key=lambda outcome: outcome.lease.span)

    def _follow_taking(self, function: Function, call: ast.Call, source: Source) -> None:
        self.recogniser.second_hand[call] = source
        self._follow(function, call, source)

    def _follow_out_of_tables(self, found: dict[int, tuple[StoredField, ...]]) -> None:
        """What a method takes out of a table, and it or another gives back, where nobody has told of a loss
        there, and none of its callers gives anything back. What is not lost has been acquired elsewhere; what
        is, is told of the acquire that is known to put it there."""
        told = [drop.at for fields in found.values() for each in fields for drop in each.drops]
        for each in list(out_of_tables(self.recogniser)):
            known = id(each.call) in self.outcomes or each.call in self.recogniser.second_hand
            its = [at.line for at in told if at.path == each.function.module.path]
            if known or each.function in each.function.module.functions_at(its):
                continue
            try:
                outcome = self._follower(each.function).outcome(each.call, each.source)
            except (TooLarge, TooManyStates, RecursionError):
                continue  # of what is not followed nothing is said
            if outcome is None or not loses_normally(outcome.lease):
                continue
            itself = bool(outcome.lease.released)
            if itself and each.put:
                continue  # under a flag of the record, as it was taken under one
            if not (itself or (each.believed and for_good(self.project, each.function))):
                continue
            acquired = [self.outcomes[id(call)] for call in each.put if id(call) in self.outcomes]
            if not told_where_it_was_put(found, outcome, acquired):
                self.recogniser.second_hand[each.call] = each.source
                self.outcomes[id(each.call)] = without_exceptional(outcome)

    def _shared_fields(self, asked: Fields, known: Found) -> dict[int, tuple[StoredField, ...]]:
        """Of what no object has, but the functions of a module or a class share."""
        unsaid = [
            each
            for each in self._in_order()
            if not loses_normally(each.lease) and all(map(is_seen_to, known.get(id(each.call), ())))
        ]
        methods = as_methods(unsaid, self.recogniser, self._followed_again)
        return told_as_functions(asked.stored(methods.values()), methods)

    def _fields_of_contexts(self, asked: Fields, known: Found) -> dict[int, tuple[StoredField, ...]]:
        """Of objects that a lease was brought to, and that a `with` ends."""
        unsaid = {
            id(e.call): e for e in self._in_order() if not (loses_normally(e.lease) or id(e.call) in known)
        }
        brought = brought_to_contexts(unsaid.values(), self.recogniser, self._followed_again)
        return told_where_it_was_taken(asked.stored(brought.values()), brought, unsaid)

    def _followed_again(self, function: Function, call: ast.Call) -> Outcome | None:
        """In a copy of its function."""
        try:
            source = self.recogniser.source(function, call)
            return self._follower(function).outcome(call) if source is not None else None
        except (TooLarge, TooManyStates, RecursionError):
            return None  # which is said of the function itself

    def _left_to_others(self, outcome: Outcome) -> Outcome:
        ends = self.recogniser.ending_names(outcome.acquisition.protocol)
        outcome = lost_by_who_has_it(outcome, self.model, self.effects, ends)
        return self.left_to_the_idle.told(outcome, ends)

    def _decided(self, outcome: Outcome, fields: tuple[StoredField, ...], custom: Mapping[str, str]) -> Lease:
        unasked = self.never_ended.of(outcome)
        lease = replace(
            outcome.lease,
            fields=fields,
            callers=callers_of(outcome, self.received.get(outcome.function, ())),
            unasked=unasked,
        )
        if not (lease.leaks or lease.told_elsewhere or fields):
            return lease  # nothing to repair
        way = giving_back(self.recogniser, outcome.function, outcome.call)
        by_lease = custom.get(lease.protocol)
        if by_lease and outcome.acquisition.handle is Handle.RESULT and not (way and way.lending):
            each = any(place[-1] == "[*]" for place in outcome.acquisition.places)
            if each or not returns_several(self.recogniser, outcome.function, outcome.call):
                way = GivingBack(by_lease, each=each)
        if way is not None and outcome.acquisition.handle is Handle.RECEIVER:
            way = replace(way, itself=True)
        return replace(lease, giving_back=way)

    def _lines(self, path: str) -> Sequence[str]:
        return module.lines if (module := self.project.module(path)) is not None else ()

    def _misuses(self, outcomes: Sequence[Outcome]) -> tuple[Misuse, ...]:
        """What else is wrong with leases, besides their loss."""
        endings = Endings(self.recogniser, self.effects)
        misused = Misused(self.project, self.recogniser, endings, self._calling, self._known)
        return misused.misuses([outcome for outcome in outcomes if outcome.acquisition.single])

    def _calling(self, words: set[str]) -> list[str]:
        return sorted(self.called.calling(self.relevant, words))

    def _known(self, function: Function) -> dict[int, Knowledge]:
        return self._follower(function).known

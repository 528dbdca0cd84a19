"""Follow one acquire call and write down what became of it."""

import ast
import re
from collections.abc import Iterator, Set
from dataclasses import replace

from auditor.flow.effects import Acquisition, Handle, Value
from auditor.flow.follow import EDGES, Followed
from auditor.flow.held import Endings
from auditor.flow.lease import EXCEPTIONAL, Leak, Lease, Loss
from auditor.flow.trace import shortest_path
from auditor.ir.ops import RAISING, Await, Call, Move, is_temporary
from auditor.model import Span, Step
from auditor.project.code.bindings import TEST_FILE, TEST_FOLDER, TEST_NAME
from auditor.project.code.field_paths import own_field
from auditor.project.code.modules import Function
from auditor.project.code.own_lengths import tell_lengths_apart
from auditor.project.code.rewriting import note_rewritten_flags
from auditor.project.fields.ended_by_others import (
    counts_places,
    ends_with_its_script,
    expected_to_fail,
    left_detached,
    of_an_allocator_of_its_own,
    only_compared,
    taking_over,
)
from auditor.project.leases.afterwards import Afterwards
from auditor.project.leases.broken_off import broken_off_at
from auditor.project.leases.cancelled_with_it import cancelled_with_it
from auditor.project.leases.counted_again import noted_once
from auditor.project.leases.dealt_out import dealt_out
from auditor.project.leases.ended_beside import ended_beside, latched_beside
from auditor.project.leases.ended_by_closures import ended_by_closures
from auditor.project.leases.ends_by_itself import ends_by_itself
from auditor.project.leases.entered_below import entered_below
from auditor.project.leases.filled_and_refused import refused_with_it
from auditor.project.leases.given_back_at_times import given_back_at_times
from auditor.project.leases.given_back_by_number import without_given_back
from auditor.project.leases.given_back_in_part import given_back_in_part
from auditor.project.leases.in_turns import ended_in_a_later_turn
from auditor.project.leases.last_turn import is_of_the_last_turn
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.leases.late_bound import late_bound
from auditor.project.leases.left_out import lines_left_out
from auditor.project.leases.left_with_a_task import left_with_a_task
from auditor.project.leases.less_given_back import less_comes_back, of_an_amount
from auditor.project.leases.losses import Losses
from auditor.project.leases.lost_to_the_first import lost_to_the_first
from auditor.project.leases.nobodys_key import is_nobodys_key
from auditor.project.leases.not_entered import lines_not_entered
from auditor.project.leases.not_granted import of_what_was_granted
from auditor.project.leases.one_of_a_loop import in_their_turns
from auditor.project.leases.only_asked import only_asked
from auditor.project.leases.only_noted import only_noted
from auditor.project.leases.only_read import only_read
from auditor.project.leases.only_the_first import only_the_first
from auditor.project.leases.passed_over import passed_over
from auditor.project.leases.put_back import puts_back
from auditor.project.leases.refusals import is_kept_by_others, refusals, undone_at, undone_in_vain
from auditor.project.leases.refused_later import refused_later
from auditor.project.leases.released_alone import ended_alone, release_lent
from auditor.project.leases.skipped_turn import skipped_turn
from auditor.project.leases.stopped_early import stopped_early
from auditor.project.leases.taken_again import taken_again
from auditor.project.leases.taken_more_often import given_back_once
from auditor.project.leases.told_by_both import told_of_both
from auditor.project.leases.unnoted import lines_with_its_key, lines_without_a_note, lost_with_what_says_it
from auditor.project.leases.wound_back import wound_back_by_others
from auditor.project.leases.wrong_mode import ended_by_no_method, ended_in_another_mode
from auditor.project.leases.zipped_short import zipped_short
from auditor.project.meaning.effects import FunctionEffects
from auditor.project.meaning.own_pools import empties_itself, taken_at_birth
from auditor.project.meaning.sites import site_nodes
from auditor.project.meaning.source import Source
from auditor.project.outcome import Outcome, merged_outcome

BEGINNING = re.compile(
    r"_*(?:start|begin|enter|open|acc?quire|lock|setup|set_up|init|on_|enable|pin|resume|reserve|__)"
)
"""Functions whose counterpart, elsewhere, ends what they begin."""

AFTERWARDS = frozenset({Loss.RETURN, Loss.FALL_THROUGH})

AWAITING = frozenset({"gather", "wait", "wait_for", "shield", "run_until_complete", "as_completed"})
"""Functions that run the coroutines they are given and hand on what these return."""


class Follower(Afterwards):
    """Says what became of them."""

    def __init__(self, function: Function, effects: FunctionEffects, exceptions: str) -> None:
        super().__init__(function, effects, EDGES[exceptions])
        of_tests = TEST_FILE.search(function.module.path) is not None
        self.in_test = of_tests or TEST_NAME.fullmatch(function.name) is not None
        self.losses = Losses(function, effects, exceptions)
        note_rewritten_flags(function, effects.recogniser.calls)
        tell_lengths_apart(function, effects.recogniser.calls.model)

    def outcome(self, call: ast.Call, source: Source | None = None) -> Outcome | None:
        """Of the lease that the call is known for, or of another that its result holds. None where the call
        cannot be reached. Raises `solve.TooManyStates`."""
        merged: Outcome | None = None
        for node in site_nodes(self.function, call):
            if node not in self.known or not self.is_placed(node, source):
                continue
            outcome = self._outcome_at(node, source)
            merged = outcome if merged is None else merged_outcome(merged, outcome)
        return merged

    def _outcome_at(self, node: int, source: Source | None) -> Outcome:
        op = self.graph.ops[node]
        assert isinstance(op, Call)
        acquisition = self.acquisition(node, source)
        if acquisition.managed or (acquisition.handle is Handle.RESULT and op.entered):
            return self._managed(op, acquisition)
        return self._conclude(node, op, acquisition, self.followed(node, source))

    def _managed(self, op: Call, acquisition: Acquisition) -> Outcome:
        lease = self._lease(op, acquisition, ())
        return Outcome(self.function, op.at, acquisition, replace(lease, released=True))

    def _conclude(self, node: int, op: Call, acquisition: Acquisition, followed: Followed) -> Outcome:
        endings = followed.endings
        if followed.only_yielded:
            endings.returned = endings.yielded  # its consumers'
        recogniser = self.effects.recogniser
        ending = recogniser.ending_names(acquisition.protocol)
        refused_ways = refused_with_it(recogniser.calls.model, self.function, followed, ending)
        endings.lost += [(Loss.RETURN, way, held) for way, held in refused_ways]
        endings.lost += [(Loss.RETURN, way, held) for way, held in only_noted(self.function, followed)]
        leaks = told_of_both(self.function, op.at, self.losses.leaks(node, followed))
        leaks += tuple(self._lost_besides(op, acquisition, endings))
        leaks += tuple(self._lost_in_their_turns(node, acquisition, leaks))
        leaks += tuple(
            self._told(op, Loss.RETURN, at)
            for at in cancelled_with_it(self.function, recogniser.calls, op.at, self._holder(op), ending)
        )
        leaks = without_given_back(self.function, op.at, leaks, ending)
        takers = recogniser.calls.targets(self.function, op.at)[0] if acquisition.inner else ()
        own = puts_back(self.function, takers, endings)
        rolled_back = not own and self._only_rolled_back(op, acquisition, followed)
        elsewhere = rolled_back and self._ended_elsewhere(op, acquisition)
        refused = self._refused(op, acquisition, endings, leaks) if elsewhere else ()
        refused = refused or (self._unnoted(op, acquisition, followed, leaks) if elsewhere else ())
        refused = refused or lost_with_what_says_it(self.function, acquisition, ending, endings, leaks)
        unseen = not leaks and bool(endings.kept)  # in a list that a loop goes over, whatever it keeps
        refused = refused or (self._skipped(op, acquisition, leaks, ending, unseen) if elsewhere else ())
        if elsewhere and not refused:
            of = self.function, recogniser.calls
            refused = given_back_at_times(*of, endings, leaks, ending)
            refused = refused or left_with_a_task(*of, op.at, endings, leaks, ending)
        if elsewhere and not refused and not acquisition.inner:
            later = refused_later(self.function, recogniser.calls, op.at, ending)
            refused = (self._told(op, Loss.RETURN, later),) if later is not None else ()
        leaks, elsewhere = refused or leaks, elsewhere and not refused
        detached = not endings.released and left_detached(op.at, self.function)
        ended_here = not rolled_back or bool(refused)
        kept_inside = acquisition.inner and acquisition.keyed and not refused
        others = kept_inside or self._is_others_to_end(op, acquisition, endings, leaks, ended_here)
        if elsewhere or detached or others:
            elsewhere, leaks = True, ()
        lease = self._lease(op, acquisition, self._believed(node, op, acquisition, followed, leaks))
        lease = replace(
            lease,
            released=bool(endings.released),
            releases=self._releases(endings),
            handed_over=endings.handed_over
            or bool(endings.unknown or refused or endings.chosen)
            or elsewhere,
            in_context_manager=self.function.is_context_manager,
        )
        outcome = Outcome(self.function, op.at, acquisition, lease)
        left = elsewhere or bool(refused) or not endings.released
        self._tell(outcome, node, op, followed, shown=not detached, left=left)
        return outcome

    def _skipped(
        self, op: Call, acquisition: Acquisition, leaks: tuple[Leak, ...], ends: Set[str], unseen: bool
    ) -> tuple[Leak, ...]:
        """What is marked in a turn of a loop that does nothing more about it, or for an answer alone."""
        if acquisition.inner or (all(leak.loss in EXCEPTIONAL for leak in leaks) and not unseen):
            return ()
        counted = acquisition.counts and not acquisition.declared
        out: ast.AST | None = noted_once(self.function, op.at, ends) if counted else None
        out = out or only_asked(self.function, op.at, ends)
        recogniser = self.effects.recogniser
        out = out or only_read(recogniser, self.function, op.at, acquisition.protocol)
        if out is not None:
            return (self._told(op, Loss.RETURN, out),)
        return tuple(
            self._told(op, Loss.NEXT_TURN if isinstance(at, ast.Continue) else Loss.RETURN, at)
            for at in skipped_turn(self.function, op.at, ends)
        )

    def _told(self, op: Call, loss: Loss, at: ast.AST) -> Leak:
        first, last = self.losses.span(op.at), self.losses.span(at)
        begun = Step(first.path, first.line, first.column, "acquired here")
        left = Step(last.path, last.line, last.column, LAST_WORDS[loss])
        return Leak(loss, last, self._holder(op), (begun, left))

    def _lost_in_their_turns(
        self, node: int, acquisition: Acquisition, leaks: tuple[Leak, ...]
    ) -> Iterator[Leak]:
        if not all(leak.loss in EXCEPTIONAL for leak in leaks):
            return
        for followed in in_their_turns(
            self.function, self.effects, acquisition, node, self.known, self.edges
        ):
            for leak in self.losses.leaks(node, followed):
                if leak.loss not in EXCEPTIONAL:
                    yield leak

    def _lost_besides(self, op: Call, acquisition: Acquisition, endings: Endings) -> Iterator[Leak]:
        """What no way through the function shows, for a list of leases, or a name, is followed as one."""
        text = self.function.text
        ends = self.effects.recogniser.ending_names(acquisition.protocol)
        lost: list[tuple[Loss, ast.AST]] = []
        if endings.released:
            lost += [(Loss.RETURN, at) for at in stopped_early(self.function, op.at, ends)]
            lost += [(Loss.RETURN, at) for at in given_back_in_part(self.function, op.at, ends)]
            first = only_the_first(self.function, self.effects.recogniser.calls, op.at, ends)
            once = given_back_once(self.function, op.at, ends) if acquisition.keyed else None
            lost += [(Loss.RETURN, each) for each in (first, once) if each is not None]
        if (endings.released or endings.stored) and "zip(" in text:
            calls = self.effects.recogniser.calls
            lost += [(Loss.RETURN, at) for at in zipped_short(calls, self.function, op.at, ends)]
        if acquisition.handle is Handle.RESULT and "setdefault(" in text:
            lost += [(Loss.RETURN, at) for at in lost_to_the_first(self.function, op.at)]
        if acquisition.handle is Handle.RESULT and "lambda" in text:
            lost += [(Loss.NEXT_TURN, at) for at in late_bound(self.function, op.at, ends)]
        yield from (self._told(op, loss, at) for loss, at in lost)

    def _refused(
        self, op: Call, acquisition: Acquisition, endings: Endings, leaks: tuple[Leak, ...]
    ) -> tuple[Leak, ...]:
        """Of what is lost here, and may be others' to end, that of which no other can know."""
        known_to_others = acquisition.inner or acquisition.keyed
        in_records = endings.stored or any(endings.returned.values())
        noted = acquisition.value is Value.AMOUNT and bool(in_records)
        kept = bool(endings.kept) or noted or (known_to_others and bool(endings.returned))
        calls = self.effects.recogniser.calls
        refused = refusals(self.function, calls, op.at, acquisition, leaks, kept)
        asked = self.effects.summaries
        return refused or passed_over(self.function, op.at, asked, acquisition, endings, leaks)

    def _unnoted(
        self, op: Call, acquisition: Acquisition, followed: Followed, leaks: tuple[Leak, ...]
    ) -> tuple[Leak, ...]:
        """Of an amount or a count, what nobody has heard of."""
        if acquisition.inner or acquisition.helped:
            return ()
        marked = acquisition.keyed and acquisition.handle is Handle.ARGUMENT
        lines = lines_left_out(self.function, op.at, followed) if marked else set[int]()
        if marked and not lines:
            ends = self.effects.recogniser.ending_names(acquisition.protocol)
            lines = lines_not_entered(self.function, op.at, ends, followed)
        lines = lines or self._without_a_note(op, acquisition, followed)
        return tuple(leak for leak in leaks if leak.loss is Loss.RETURN and leak.at.line in lines)

    def _without_a_note(self, op: Call, acquisition: Acquisition, followed: Followed) -> set[int]:
        counts = acquisition.handle is Handle.RECEIVER and not acquisition.declared
        recogniser = self.effects.recogniser
        ends = recogniser.ending_names(acquisition.protocol)
        project = recogniser.calls.model.project
        if not (acquisition.value is Value.AMOUNT or counts):
            return set()
        if not any(project.calling(name) for name in ends):
            return set()  # tokens that come back with time
        return lines_without_a_note(self.function, op.at, ends, followed)

    def _is_others_to_end(
        self, op: Call, acquisition: Acquisition, endings: Endings, leaks: tuple[Leak, ...], ended_here: bool
    ) -> bool:
        """Whether somebody else sees to it, or nobody has to."""
        function = self.function
        return (
            self._is_the_tests_own(op, acquisition, endings)
            or (self.in_test and expected_to_fail(op.at, function))
            or self._still_to_run(op, acquisition)
            or wound_back_by_others(function, self.effects.recogniser, op.at, acquisition.protocol)
            or self._may_last(acquisition, endings)
            or entered_below(op.at, self.effects.recogniser.calls.targets(function, op.at)[0])
            or counts_places(op.at, function, ended_here=ended_here)
            or ends_with_its_script(op.at, function)
            or (only_compared(op, self.graph) and not self._is_lent_by_a_pool(op))
            or self._taken_over(op, endings)
            or self._ended_later(op, endings)
            or self._known_where_it_was_found(acquisition, leaks)
            or ends_by_itself(op.at, function)
            or (acquisition.value is Value.INDEX and self._ends_with_its_allocator(op))
            or taken_at_birth(op.at, function)
            or empties_itself(op.at, function)
            or (acquisition.handle is Handle.RECEIVER and taken_again(function, op.at))
        )

    def _believed(
        self, node: int, op: Call, acquisition: Acquisition, followed: Followed, leaks: tuple[Leak, ...]
    ) -> tuple[Leak, ...]:
        """Without what is no loss of an amount, of numbers that are dealt out, or once a task is started."""
        takers = self.effects.recogniser.calls.targets(self.function, op.at)[0] if leaks else ()
        leaks = of_what_was_granted(self.function, op.at, takers, leaks)
        if any(leak.loss is Loss.NEXT_TURN for leak in leaks) and is_of_the_last_turn(self.function, op.at):
            leaks = tuple(leak for leak in leaks if leak.loss is not Loss.NEXT_TURN)
        if acquisition.value is Value.AMOUNT:
            return tuple(map(of_an_amount, leaks))
        if acquisition.value is Value.INDEX and (dealt := dealt_out(self.function, node, followed)):
            return tuple(leak for leak in leaks if leak.loss not in AFTERWARDS or leak.at.line < min(dealt))
        if acquisition.handle is Handle.RECEIVER and leaks:
            ends = self.effects.recogniser.ending_names(acquisition.protocol)
            noted = lines_with_its_key(self.function, op.at, ends, followed)
            leaks = tuple(leak for leak in leaks if leak.at.line not in noted)
        ended = followed.endings.released.keys() - followed.endings.sometimes
        if acquisition.keyed and ended:
            return tuple(leak for leak in leaks if not leak.started)
        return leaks

    def _may_last(self, acquisition: Acquisition, endings: Endings) -> bool:
        """What is ended by calling what was handed out, and nobody here ever calls that, or keeps it; not
        where something else was handed out with it, for which it was asked."""
        alone = len(acquisition.places[0]) == 1
        called = alone and acquisition.protocol in self.effects.recogniser.called
        return called and not (endings.is_somebodys or endings.stored)

    def _is_lent_by_a_pool(self, op: Call) -> bool:
        """Of the tree, whose body says that what it returns is the lease."""
        recogniser = self.effects.recogniser
        targets = recogniser.calls.targets(self.function, op.at)[0]
        halves = [recogniser.acquiring[target][1] for target in targets if target in recogniser.acquiring]
        return bool(halves) and all(half.handle is Handle.RESULT for half in halves)

    def _releases(self, endings: Endings) -> tuple[Span, ...]:
        """The calls that give it back."""
        calls = (self.graph.ops[node] for node in endings.released)
        return tuple(sorted({self.losses.span(op.at) for op in calls if isinstance(op, Call)}))

    def _taken_over(self, op: Call, endings: Endings) -> bool:
        """Given back only where a call of which nothing is known did not take it."""
        releases = [self.graph.ops[node].at for node in endings.released]
        calls = self.effects.recogniser.calls
        taking = taking_over(self._holder(op), releases, self.function)
        return bool(taking) and not any(calls.targets(self.function, call)[0] for call in taking)

    def _ended_later(self, op: Call, endings: Endings) -> bool:
        releases = [self.graph.ops[node].at for node in endings.released]
        return ended_in_a_later_turn(self.function, op.at, releases)

    def _ends_with_its_allocator(self, op: Call) -> bool:
        root = op.receiver[0] if op.receiver is not None else ""
        known = self.effects.recogniser.calls.targets(self.function, op.at)[0]
        made_here = root in self.graph.fresh_roots and not known
        return made_here and of_an_allocator_of_its_own(op.at, self.function)

    def _known_where_it_was_found(self, acquisition: Acquisition, leaks: tuple[Leak, ...]) -> bool:
        """`request = queue.peek()`, marked, and `request = queue.pop()`: others knew it before."""
        if acquisition.handle is not Handle.ARGUMENT or acquisition.value is Value.AMOUNT:
            return False
        rebound = any(leak.loss is Loss.REBOUND for leak in leaks)
        return rebound and acquisition.places[0][0] not in self.function.parameters

    def _only_rolled_back(self, op: Call, acquisition: Acquisition, followed: Followed) -> bool:
        """Nothing here gives it back, or nothing but the handling of a failure.

        What is only marked (pinned, locked, counted) and given back when something fails is kept on purpose
        otherwise."""
        ended = followed.endings.released | followed.endings.later
        released = {node: held for node, held in ended.items() if self._only_ends(node)}
        if is_kept_by_others(acquisition):
            undone = undone_at(self.function) | undone_in_vain(self.function, op.at)
            ends = self.effects.recogniser.ending_names(acquisition.protocol)
            undone |= broken_off_at(self.effects.recogniser.calls, self.function, acquisition, ends)
            released = {
                node: held for node, held in released.items() if id(self.graph.ops[node].at) not in undone
            }
        if not acquisition.keyed or not released:
            return not released
        released = {node: held for node, held in released.items() if node not in followed.endings.sometimes}
        return not any(
            all(
                station.edge not in RAISING
                for station in shortest_path(self.graph, followed.solution, node, held)
            )
            for node, held in released.items()
        )

    def _only_ends(self, node: int) -> bool:
        """A call that acquires anew, and for which the callee makes room first, gives nothing back here."""
        op = self.graph.ops[node]
        return not isinstance(op, Call) or self.effects.acquisition(op) is None

    def _ended_elsewhere(self, op: Call, acquisition: Acquisition) -> bool:
        """A lock, a count or a process-wide state that this function never ends: may somebody else?

        Yes where others can reach its key: an object that was passed in, a field. A global or the process
        can be reached by all, but only a function named for the acquiring leaves it to others; an object
        made here is reached by nobody."""
        if acquisition.inner or (acquisition.helped and acquisition.keyed):
            return True  # of what a helper took and nobody ends it is told there
        ends = self.effects.recogniser.ending_names(acquisition.protocol)
        if acquisition.handle is Handle.ARGUMENT and ended_beside(self.function, op.at, ends):
            return False
        if acquisition.handle is Handle.RECEIVER and latched_beside(self.function, op.at, ends):
            return False
        if acquisition.value is Value.AMOUNT:
            return not less_comes_back(self.effects.recogniser, self.function, op.at, acquisition)
        if not acquisition.keyed:
            dies = acquisition.own_key and not acquisition.opened  # a local lock dies with the call
            return dies and acquisition.handle is Handle.RECEIVER
        place = acquisition.places[0]
        if acquisition.handle is Handle.RECEIVER:
            if self._in_another_mode(op, acquisition):
                return False
            if release_lent(self.function, op.at):
                return True
            if acquisition.declared and place[:-1] == (self.function.owner,):
                begins = BEGINNING.match(self.function.name) is not None
                return begins or ended_alone(self.effects.recogniser, self.function, op.at, place[-1][1:])
        if is_nobodys_key(self.effects.recogniser, self.function, op.at, acquisition):
            return False
        if not acquisition.declared or self.function.qualname == "<module>":
            return True
        if place[0].startswith("@") and ended_by_closures(self.function, place[0][1:], ends):
            return True
        if place[0].startswith(("@", "<")):
            return BEGINNING.match(self.function.name) is not None or self.function.is_method
        return place[0] in self.graph.parameters or place[0] not in self.graph.fresh_roots

    def _in_another_mode(self, op: Call, acquisition: Acquisition) -> bool:
        recogniser, cls = self.effects.recogniser, self.function.cls
        ends = recogniser.ending_names(acquisition.protocol)
        asked = recogniser, op.at, acquisition.protocol, ends
        if ended_in_another_mode(self.function, *asked):
            return True
        family = cls.methods.values() if cls is not None else ()
        return own_field(self.function, acquisition.places[0]) and ended_by_no_method(family, *asked)

    def _still_to_run(self, op: Call, acquisition: Acquisition) -> bool:
        """A coroutine handed to somebody who will run it: the lease begins there, if it ever does."""
        targets, _, _ = self.effects.recogniser.calls.targets(self.function, op.at)
        asynchronous = all(isinstance(target.node, ast.AsyncFunctionDef) for target in targets)
        if not targets or not asynchronous or acquisition.by_generator:
            return False
        return any(
            isinstance(other, Call)
            and other.method not in AWAITING
            and other.receiver != ("asyncio",)
            and any(path == op.target for path, _ in other.args)
            for other in self.graph.ops
        )

    def _is_the_tests_own(self, op: Call, acquisition: Acquisition, endings: Endings) -> bool:
        """A test's own pool dies with the test: what it leaves held there is often the point. So is what a
        test of this tree's own pool never gives back, whoever made that; a folder of tests counts where the
        pool stands outside of it."""
        root = op.receiver[0] if op.receiver is not None else "@"
        if self.in_test and not root.startswith("@") and root not in ("self", "cls"):
            return True
        if acquisition.declared or endings.released:
            return False
        return self.in_test or self._of_the_tree_around(acquisition.protocol)

    def _of_the_tree_around(self, protocol: str) -> bool:
        if TEST_FOLDER.search(self.function.module.path) is None:
            return False
        halves = self.effects.recogniser.acquiring.items()
        homes = [each.module.path for each, (pair, _) in halves if pair.name == protocol]
        return bool(homes) and not any(map(TEST_FOLDER.search, homes))

    def _lease(self, op: Call, acquisition: Acquisition, leaks: tuple[Leak, ...]) -> Lease:
        return Lease(
            span=self.losses.span(op.at),
            symbol=self.function.qualname,
            text=" ".join(ast.unparse(op.at).split()),
            protocol=acquisition.protocol,
            holder=self._holder(op),
            leaks=leaks,
            value=acquisition.value,
        )

    def _holder(self, op: Call) -> str:
        """The name the lease got first, for messages."""
        followed = op.target
        for each in self.graph.ops:
            if isinstance(each, Move | Await) and each.source == followed:
                if not is_temporary(each.target) and "~" not in each.target[0]:
                    return "".join(each.target).lstrip("@")
                followed = each.target
        return ""

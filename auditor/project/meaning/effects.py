"""What the calls of one function do to a lease: protocols first, then summaries, then what is known of the
rest of the world."""

import ast
import builtins
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from auditor.flow.effects import (
    BORROWED,
    RELEASED,
    TAKEN,
    Fate,
    Position,
    Treatment,
    Value,
)
from auditor.flow.indirect import ON_EXIT, OVER
from auditor.flow.operands import PROCESS_POSITION, operands
from auditor.flow.perhaps import COPYING_OUT
from auditor.flow.spelled import SHARED_POSITION
from auditor.ir.ops import ANY_ITEM, Assume, Call, Path, is_temporary
from auditor.project.code.bindings import given_to
from auditor.project.code.calls import constants_passed, is_bound, parameter_for
from auditor.project.code.kept_as_told import field_told, spellings
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.code.put_off import never_run
from auditor.project.code.release_names import ENDING
from auditor.project.code.started import as_a_task, started
from auditor.project.meaning import unborn
from auditor.project.meaning.ended_by_key import ends_what_was_asked
from auditor.project.meaning.ended_whatever_told import ends_whatever_it_is_told
from auditor.project.meaning.exit_stacks import PUTTING, held_by_stack, put_on, stacks_of
from auditor.project.meaning.later import ON_SOME_WAYS, Later
from auditor.project.meaning.library import BORROWING
from auditor.project.meaning.needs import Question
from auditor.project.meaning.never_runs import never_runs
from auditor.project.meaning.not_owning import is_not_owned
from auditor.project.meaning.outside import OutsideEffects
from auditor.project.meaning.outside_words import MEASURING
from auditor.project.meaning.process_wide import ProcessWide
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.records_told import Constants, constants_of_record
from auditor.project.meaning.saying_itself import only_says_what_it_has
from auditor.project.meaning.shared_objects import SharedObjects
from auditor.project.meaning.summaries import FAILURE, NOTHING, Summaries
from auditor.project.meaning.telling import asked_of, ignored
from auditor.project.meaning.told_ends import ToldEnds, is_a_release
from auditor.project.pools.bodies import contains_failures, only_notes, returns_itself
from auditor.project.pools.lent_kinds import TENSORS
from auditor.protocols.vocabulary import LEASE_METHODS, RELEASING
from auditor.source.nodes import walk

STARTED = ("run",)
LEFT = ("__exit__", "__aexit__")
"""Methods that run by themselves, of a thread and of what is entered."""

COPYING = frozenset(
    {"list", "tuple", "set", "frozenset", "dict", "bytes", "bytearray", "str", "float", "int"}
)
"""What classes derived from these make of one argument is a copy, if they have no `__init__`."""

TAKING_APART = frozenset({"list", "tuple", "set", "frozenset", "sorted", "reversed", "deque", "filter",
                          "map", "enumerate", "zip", "zip_longest", "next", "chain", "from_iterable",
                          "islice"})  # fmt: skip
"""Functions that go over what they are given, and hand on its items."""


class FunctionEffects(OutsideEffects):
    """Answers the ownership domain for the calls that one function makes."""

    def __init__(
        self, function: Function, recogniser: Recogniser, summaries: Summaries, told_ends: ToldEnds
    ) -> None:
        super().__init__(function, recogniser)
        self.summaries = summaries
        self._later = Later(function, summaries, self._nested, recogniser.calls.model.callee)
        self._process_wide = ProcessWide(function, recogniser, summaries, self._nested)
        self._shared = SharedObjects(function, recogniser, summaries)
        self._told_ends = told_ends
        self._known: dict[tuple[int, Position, Path, Value, str], Treatment] = {}

    def only_releases(self, call: Call) -> bool:
        name = call.method
        return RELEASING.fullmatch(name) is not None or name in LEASE_METHODS

    def ends_what_was_asked(self, call: Call, begun: Call, protocol: str) -> bool:
        asked = self.recogniser, self.function, call.at, begun.at, protocol
        return (
            ends_what_was_asked(*asked)
            or ends_whatever_it_is_told(*asked)
            or self._begins_anew(call, protocol)
        )

    def _begins_anew(self, call: Call, protocol: str) -> bool:
        """`slots.vacate_all()`, of whom the lease was asked"""
        renewing = self.recogniser.renewing(protocol)
        return bool(renewing) and not renewing.isdisjoint(
            self.recogniser.calls.targets(self.function, call.at)[0]
        )

    def is_own_end(self, method: str, protocol: str) -> bool:
        return method in self.recogniser.ending_names(protocol)

    def dies_with_its_object(self, place: Path) -> bool:
        return unborn.dies_with_its_object(self.recogniser.calls.model, self.function, place)

    def contains_failures(self, node: ast.Call) -> bool:
        """Every function it may reach catches whatever goes wrong in it, or notes down what it is told."""
        targets, constructed, _ = self.recogniser.calls.targets(self.function, node)
        if isinstance(constructed, Class):
            made = self.recogniser.calls.model.method(constructed, "__init__")
            return made is not None and only_notes(made)
        return bool(targets) and constructed is None and all(contains_failures(target) for target in targets)

    def only_says_what_it_has(self, node: ast.Call) -> bool:
        return only_says_what_it_has(self.recogniser.calls, self.function, node)

    def raises(self, node: ast.Call) -> frozenset[str]:
        """The classes of what the one function that it reaches raises in so many words."""
        raised = self.recogniser.written_raises.by_call(self.function, node)
        own = {name for each in raised for name in each if not hasattr(builtins, name)}
        return frozenset(own | {each[0] for each in raised})

    def raises_past(self, node: ast.Call) -> bool:
        """Whether it raises something that no handler around it is for, and that somebody reckons with."""
        written = self.recogniser.written_raises
        return any(written.is_expected(self.function, each) for each in written.leaving(self.function, node))

    def captured(self, function: object, name: str, rest: Path, value: Value, protocol: str) -> Treatment:
        nested = self._nested(function)
        if any("atexit" in decorator for decorator in nested.decorators):
            return TAKEN  # it is needed until the process ends
        answer = self.summaries.answer(Question(nested, (name, *rest), value, protocol))
        chosen = answer.sometimes and answer.only_kept and bool(answer.kept_by - FAILURE)
        if answer.fate is Fate.RELEASE and chosen and not self._calls_itself(nested):
            return Treatment(split=True)  # `def done(ok): if ok: pool.give(buffer)`
        return Treatment(answer.fate)

    def _calls_itself(self, nested: Function) -> bool:
        """The function that makes it may know what it tells it."""
        return any(
            isinstance(call.func, ast.Name) and call.func.id == nested.name for call in self.function.calls
        )

    def _nested(self, node: object) -> Function:
        """A lambda, or a function within one that is seen as a method, in a copy."""
        known = self.function.module.by_node.get(id(node))
        if known is not None:
            return known
        assert isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef)
        name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
        made = Function(
            self.function.module, f"{self.function.qualname}.{name}", node, self.function.cls, self.function
        )
        self.function.module.by_node[id(node)] = made
        return made

    def treatment(self, call: Call, position: Position, rest: Path, value: Value, protocol: str) -> Treatment:
        if never_runs(self.function, call.at, self.recogniser.calls):
            return BORROWED
        key = (id(call), position, rest, value, protocol)
        if key not in self._known:
            found = self._treat(call, position, rest, value, protocol)
            kept = found.fate is Fate.TAKE or (found.fate is Fate.RELEASE and call.receiver in self._stacks)
            if position == -1 and call.method == "start" and rest and found.fate is Fate.TAKE:
                of = getattr(call.at.func, "value", None)
                found = BORROWED if self._left_alone(of, STARTED, rest, value, protocol) else found
            stacked = kept and position != -1 and call.method in PUTTING
            self._known[key] = put_on(call, self._stacks) if stacked else found
        return self._known[key]

    def forget(self) -> None:
        self._known.clear()

    def owed_behind_its_with(self, context: ast.AST, inside: Path, value: Value, protocol: str) -> bool:
        left = bool(inside) and self._left_alone(context, LEFT, inside, value, protocol)
        return left or super().owed_behind_its_with(context, inside, value, protocol)

    def _left_alone(
        self, of: ast.AST | None, methods: Sequence[str], rest: Path, value: Value, protocol: str
    ) -> bool:
        """Whether the method of this object, whose class is known, does nothing with the lease in it: `with
        Timed(slot):`, `Checker(slot).start()`."""
        model = self.recogniser.calls.model
        cls = model.type_of(self.function, of) if isinstance(of, ast.expr) else None
        found = [model.method(cls, name) for name in methods] if isinstance(cls, Class) else []
        method = next((each for each in found if each is not None and each.owner is not None), None)
        if method is None or method.owner is None:
            return False
        return self.summaries.answer(Question(method, (method.owner, *rest), value, protocol)) == NOTHING

    def put_on_a_stack(self, call: Call) -> Treatment | None:
        return put_on(call, self._stacks) if call.method in PUTTING and call.receiver is not None else None

    @cached_property
    def _stacks(self) -> frozenset[Path]:
        return stacks_of(self.function)

    def _treat(self, call: Call, position: Position, rest: Path, value: Value, protocol: str) -> Treatment:
        function, node = self.function, call.at
        if self.never_runs(node):
            return BORROWED
        if position == PROCESS_POSITION:
            return self._process_wide.treatment(call, value, protocol)
        if isinstance(position, str) and position.startswith(SHARED_POSITION):
            place = (position.removeprefix(SHARED_POSITION), *rest)
            return self._shared.treatment(call, place, value, protocol)
        if rest and (indirect := self._indirect(call, position, rest, value, protocol)) is not None:
            return indirect
        if position == -1 and rest:
            called_back = self._later.told_of_itself(call, rest, value, protocol)
            if called_back is not None:
                return called_back
            if any(is_a_release(self.recogniser, self.function, each) for each in call.at.args):
                return TAKEN  # `work.then(pool.free)`, of work that has the lease
        if position == -1 and rest and rest[0].startswith("."):
            own, constructed, _ = self.recogniser.calls.targets(function, node)
            if own and constructed is None and not any(target.is_abstract for target in own):
                found = self._summarised(call, own, position, rest, value, protocol)
                return found if self._counts_another(call) else _with_itself(found, own, rest)
        if self.recogniser.releases(function, node, position, protocol):
            return RELEASED
        if self.recogniser.transfers(function, node, position):
            return TAKEN
        if position == -1 and MEASURING.fullmatch(call.method):
            return BORROWED  # whatever the class looks at to say so: `memory.get_size()`
        if position == 0 and self._told_ends.is_end(function, node):
            return RELEASED
        if self._passes_release(call, position) and not self._told_ends.has_its_end(function, node):
            return TAKEN
        worker = started(self.recogniser.calls.model, function, call, position, rest)
        if worker is not None:
            return self._later.worked_on(call, *worker, value, protocol)
        task = as_a_task(self.recogniser.calls.model, function, call, position)
        if task is not None:
            told = self._told_with(call, position, rest, task[1])
            if self._later.worked_on(call, *task, rest, value, protocol, told) == ON_SOME_WAYS:
                return ON_SOME_WAYS
        if call.receiver is None and not rest and call.method in TAKING_APART and self._is_copied(protocol):
            return BORROWED  # `sorted(file)`: the lines are not the file
        targets, constructed, dotted = self.recogniser.calls.targets(function, node)
        of_library = position == -1 and not rest and protocol in self.recogniser.of_library
        if targets and of_library and self.recogniser.calls.guessed(function, node):
            targets = ()  # a file's own method, whatever the project has of that name
        if constructed is not None:
            return self._constructed(call, constructed, targets, position, rest, value, protocol)
        if targets:
            found = self._summarised(call, targets, position, rest, value, protocol)
            asked = targets, position, rest, value
            apart = _copies_out(call, *asked) or _shows_memory(*asked)
            if found.fate is Fate.BORROW and apart:
                return replace(found, result=None)
            if found.fate is Fate.BORROW or not self._hearsay(call, position, rest, value):
                return found
        treatment = self.outside(call, dotted, position, rest, value)
        if treatment.fate is Fate.TAKE and rest and rest[0].startswith(".") and self._itself(call, position):
            return BORROWED  # `registry.add(self)` takes the object; what is in its fields it keeps
        return treatment

    def _is_copied(self, protocol: str) -> bool:
        return self.ends_itself(protocol) or self.lends_plain_memory(protocol)

    def _indirect(
        self, call: Call, position: Position, rest: Path, value: Value, protocol: str
    ) -> Treatment | None:
        """Of what leads to the lease without being it or a field with it: a stack of exits, an archive over
        it, a closure."""
        first, *further = rest
        if first == ON_EXIT:
            shown = position != -1 and call.method in BORROWING
            return BORROWED if shown else held_by_stack(self.function, call, position)
        if position == -1 and first == OVER:
            return BORROWED  # an archive's own end is not the file's
        if first.startswith("<") and first != OVER:
            field = self._told_ends.field_of_closure(self.function, call.at, position)
            if field is not None:
                return Treatment(result=(f".{field}", *rest))
            if call.method == "append" and position == 0 and self._is_own_list(call.receiver):
                return Treatment(moved_to=(*(call.receiver or ()), ANY_ITEM, *rest))
            if first == "<partial>" and position != -1 and self._is_partial_end(call, position):
                return self._later.told_an_end(call, position)
            return self._later.closure(call, position, rest, value, protocol)
        if (
            position == -1 and first == f".{call.method}"
        ):  # `self.stop()`, or a closure that was told at birth
            called = further[0].startswith("<") if further else protocol in self.recogniser.called
            return RELEASED if called else None
        return None

    def _told_with(self, call: Call, position: Position, rest: Path, name: str) -> Constants:
        """What is known of the record that the lease is passed in."""
        if not rest:
            return frozenset()
        return constants_of_record(self.recogniser.calls, self.function, call.at, position, name)

    def _hearsay(self, call: Call, position: Position, rest: Path, value: Value) -> bool:
        """A method of the lease itself, known by its name alone: a connection of this tree that closes itself
        when `recv` fails says nothing of all connections, unless the name speaks of an end."""
        own = position == -1 and not rest and value is Value.OBJECT
        return (
            own and not ENDING.search(call.method) and self.recogniser.calls.guessed(self.function, call.at)
        )

    def _is_own_list(self, place: Path | None) -> bool:
        """`undo` of `undo = []`, of what is to be called in the end."""
        given = list(given_to(self.function, place[0])) if place is not None and len(place) == 1 else []
        return bool(given) and all(isinstance(each, ast.List) and not each.elts for each in given)

    def _is_partial_end(self, call: Call, position: Position) -> bool:
        """`run_with(job, partial(pool.put, row))`"""
        match self._later.passed(call, position):
            case ast.Call(args=[inner, ast.Name()]):
                return is_a_release(self.recogniser, self.function, inner)
        return False

    def _itself(self, call: Call, position: Position) -> bool:
        own = self.function.owner
        return own is not None and any(
            path == (own,) for given, path in operands(call) if given == position and position != -1
        )

    def _passes_release(self, call: Call, position: Position) -> bool:
        """`stack.callback(pool.free, buf)`: a releasing function goes along with the lease; it may be the
        lease's own: `stack.callback(lease.release)`."""
        if never_run(self.function, call) or call.method == "partial":
            return False  # `undo = partial(pool.free, block)` has it until somebody calls that
        if isinstance(position, int) and 0 <= position < len(call.at.args):
            match call.at.args[position]:
                case ast.Attribute(value=ast.Name()) as own:
                    imagined = ast.Call(func=own, args=[], keywords=[])
                    if self.recogniser.releases_by_name(imagined, -1, Value.OBJECT):
                        return True
        for index, argument in enumerate(call.at.args):
            if index != position and is_a_release(self.recogniser, self.function, argument):
                return True
        return False

    # Project functions --------------------------------------------------------------------------------------

    def _summarised(
        self,
        call: Call,
        targets: tuple[Function, ...],
        position: Position,
        rest: Path,
        value: Value,
        protocol: str,
    ) -> Treatment:
        answers = [self._ask(call, target, position, rest, value, protocol) for target in targets]
        if len(answers) == 1:
            return answers[0]
        for fate in (Fate.RELEASE, Fate.TAKE, Fate.UNKNOWN):
            for answer in answers:
                if answer.fate is fate:
                    return replace(answer, split=False)
        results = [answer for answer in answers if answer.result is not None]
        if not results:
            return BORROWED
        certain = len(results) == len(answers) and not any(answer.maybe for answer in results)
        return Treatment(result=results[0].result, maybe=not certain)

    def _ask(
        self, call: Call, target: Function, position: Position, rest: Path, value: Value, protocol: str
    ) -> Treatment:
        bound = is_bound(target, call.at)
        name = parameter_for(target, position, bound)
        if name is None:
            return self._into_rest(call, target, position, rest, value, protocol)
        if target.is_abstract:
            return self.outside(call, None, position, rest, value)
        told = constants_passed(target, call.at, bound) | self._told_with(call, position, rest, name)
        question = Question(target, (name, *rest), value, protocol, told)
        answer = self.summaries.answer(question)
        graph = self.function.graph
        unasked = answer.fate is Fate.TAKE and ignored(graph, call)
        telling = answer.telling and (unasked or asked_of(graph, call))
        if unasked and answer.handed_back and not asked_of(graph, call):
            return replace(answer.treatment, split=True)  # `drone.accept(pad)` may return it
        chained = position == -1 and rest and returns_itself(target) and not self._counts_another(call)
        if chained and answer.treatment == BORROWED:
            return Treatment(result=rest)  # `work.then(log).then(pool.free)`
        of_a_local = (
            call.receiver is not None and len(call.receiver) == 1 and call.receiver[0] != self.function.owner
        )
        if answer.shown is not None and position == -1 and of_a_local:
            return Treatment(result=answer.shown)  # `received = pending.take()`, which pending has as well
        if answer.fate is Fate.TAKE and len(answer.stored) == 1 and not answer.sometimes:
            moved = self._translate(call, target, answer.stored[0], bound)
            if moved is not None:
                return Treatment(result=answer.result, moved_to=moved, split=telling, says=answer.says)
        if telling and answer.fate is not Fate.BORROW:
            return replace(answer.treatment, split=True)
        treatment = answer.treatment
        if treatment.split and self._asked_again(call, target, answer.decided_by, bound):
            return replace(treatment, split=False)
        return treatment

    def _counts_another(self, call: Call) -> bool:
        """`ref = entry.retain()`: that is a lease of its own, and whatever lies in the entry stays there."""
        made = call.receiver is not None and is_temporary(call.receiver)
        return not made and self.acquisition(call) is not None

    def _asked_again(self, call: Call, target: Function, decided_by: frozenset[str], bound: bool) -> bool:
        """The caller tests what it passes as the deciding argument, so it knows which way the callee went."""
        given: list[tuple[Position, ast.expr]] = list(enumerate(call.at.args))
        given += [(keyword.arg, keyword.value) for keyword in call.at.keywords if keyword.arg is not None]
        names = {
            name.id
            for position, expression in given
            if parameter_for(target, position, bound) in decided_by
            for name in walk(expression)
            if isinstance(name, ast.Name)
        }
        return any(isinstance(op, Assume) and op.names & names for op in self.function.graph.ops)

    def _translate(self, call: Call, target: Function, stored: Path, bound: bool) -> Path | None:
        """Where the callee stored it, in the caller's words."""
        for position, path in operands(call):
            if parameter_for(target, position, bound) == stored[0]:
                return (*path, *stored[1:])
        return None

    def _into_rest(
        self, call: Call, target: Function, position: Position, rest: Path, value: Value, protocol: str
    ) -> Treatment:
        """The operand lands in *args or **kwargs, or is the callee object itself."""
        if position == -1:
            return BORROWED
        gathered = getattr(getattr(target.node, "args", None), "vararg", None)
        if isinstance(position, int) and gathered is not None and not target.is_abstract:
            question = Question(target, (gathered.arg, ANY_ITEM, *rest), value, protocol)
            answer = self.summaries.answer(question)
            if answer.fate is not Fate.UNKNOWN and answer.result is None:
                return answer.treatment
        return self.outside(call, None, position, rest, value)

    def _constructed(
        self,
        call: Call,
        cls: Class,
        targets: tuple[Function, ...],
        position: Position,
        rest: Path,
        value: Value,
        protocol: str,
    ) -> Treatment:
        """An object made around the lease holds it where its __init__ (or its field) puts it."""
        if position == -1:
            return BORROWED
        if targets:
            init = targets[0]
            name = parameter_for(init, position, True)
            if name is None:
                return Treatment(result=(ANY_ITEM, *rest))
            answer = self.summaries.answer(Question(init, (name, *rest), value, protocol))
            own = init.parameters[0] if init.parameters else "self"
            for path in answer.stored:
                if path[0] == own:
                    return self._kept(call, cls, path[1:], value, protocol)
            return answer.treatment if answer.fate is not Fate.BORROW else BORROWED
        model = self.recogniser.calls.model
        if not rest and any(COPYING & set(map(last_part, each.node.bases)) for each in model.lineage(cls)):
            return BORROWED  # `class Row(list)`: it has what is in the other one, and not the other one
        kept, *also = spellings(model, cls, (field_told(model, cls, position), *rest))
        if also:
            return Treatment(result=kept, moved_to=call.target + also[0])
        return self._kept(call, cls, kept, value, protocol)

    def _kept(self, call: Call, cls: Class, kept: Path, value: Value, protocol: str) -> Treatment:
        lent = is_not_owned(self.recogniser, self.summaries, cls, call.at, kept, value, protocol)
        return BORROWED if lent else Treatment(result=kept)


def _with_itself(found: Treatment, targets: Sequence[Function], rest: Path) -> Treatment:
    """`Run(pages).retain()` returns the object, with what lies in it."""
    untouched = found.fate is Fate.BORROW and found.result is None
    return replace(found, result=rest) if untouched and all(map(returns_itself, targets)) else found


def _shows_memory(targets: Sequence[Function], position: Position, rest: Path, value: Value) -> bool:
    """`slab.view(shape) -> Tensor`, a method of what is lent: the tensor leads nobody back to the slab."""
    if position != -1 or rest or value not in (Value.OBJECT, Value.INDEX):
        return False
    says = [getattr(target.node, "returns", None) for target in targets]
    return bool(says) and all(each is not None and ast.unparse(each).strip("'\"") in TENSORS for each in says)


def _copies_out(
    call: Call, targets: Sequence[Function], position: Position, rest: Path, value: Value
) -> bool:
    """A tensor's stand-in has its numbers in a list, `def clone(self): return list(self.data)`, which is not
    what lies in that memory, as it would be of a list of tensors. So has what a function of that name makes,
    `_clone(lease)`."""
    if rest or value not in (Value.TENSOR, Value.OBJECT):
        return False
    if position == -1:
        return value is Value.TENSOR and call.method in COPYING_OUT
    alone = all(not target.is_method for target in targets)
    return alone and position == 0 and call.method.lstrip("_") in COPYING_OUT

"""What functions do to what they are given, bottom up over the calls that pass a lease on.

The answers needed for one lease form a graph of their own: (function, parameter) pairs, an edge where a
body passes its parameter to another function. They are solved callees first; where there is a cycle, by
strongly connected components (networkx), within which recursion starts from "borrows" and is repeated until
nothing changes."""

import ast
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from auditor.flow.effects import Acquisition, Effects, Fate, Handle, Treatment, Value
from auditor.flow.follow import EDGES, Followed, follow_given
from auditor.flow.held import Held
from auditor.flow.indirect import AT
from auditor.flow.knowledge import NOTHING as NONE_KNOWN
from auditor.flow.knowledge import Knowledge
from auditor.flow.limits import TooManyStates
from auditor.flow.trace import Station, shortest_path
from auditor.ir.graph import Graph, TooLarge
from auditor.ir.ops import ANY_ITEM, RAISING, RESULT, Assume, Call, Leave, Path, Way
from auditor.project.code.annotations import type_named
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.needs import Question, needed
from auditor.project.meaning.telling import said_by, tells_apart
from auditor.project.meaning.untouching import Untouching
from auditor.project.meaning.write_only import WriteOnly
from auditor.project.pools.lent_kinds import TENSORS

EffectsOf = Callable[[Function], Effects]

ROUNDS = 4
"""Recursive functions agree with themselves after one round or two; past this the answer is unknown."""


HAPPENED = re.compile(
    r"cancel|abort|fail|err|done|finish|complet|stop|clos|expire|skip|reject|drop|ok$|success|ready|valid|timed?_?out"
)
"""Fields by which an object tells what became of it, rather than how it was set up."""

_NO_WAY_BACK = re.compile(
    r"(?:Optional\[)?(?:(?:bytes|float|bool)\b|(?:[Ll]ist|Sequence)\[(?:float|bytes)\])"
)
"""Annotations of what nobody gives an object back by."""

PROCESS: Path = ("<process>",)
"""The place of what the whole process holds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`stored` are paths that hold it afterwards; `sometimes` that only some ways out end so, `decided_by`
    which parameters decide then."""

    fate: Fate = Fate.BORROW
    result: Path | None = None
    sometimes: bool = False
    decided_by: frozenset[str] = frozenset()
    stored: tuple[Path, ...] = ()
    dropped: bool = False
    says: Knowledge = NONE_KNOWN  # of the result, where the lease was left as it was
    telling: bool = False  # what the result is elsewhere is something else
    kept_by: frozenset[str] = frozenset()  # parameters that decide whether it stays where it was
    only_kept: bool = False  # on the ways that do not end it, nobody else has it
    leaves: bool = False  # whoever gets the result has it, and the object it lay in no longer
    left: bool = False  # it is stored on some ways, and on others nobody has it
    handed_back: bool = False  # it is stored on some ways, and on others returned
    shown: Path | None = None  # where in the result it lies, and in the object as well

    @property
    def treatment(self) -> Treatment:
        chosen = bool(self.decided_by)
        if self.fate is Fate.BORROW:
            return Treatment(
                result=self.result,
                maybe=self.sometimes,
                split=self.sometimes and chosen,
                leaves=self.leaves,
            )
        return Treatment(self.fate, split=chosen, says=self.says)


NOTHING = Answer()
NOT_TOLD = Answer(Fate.UNKNOWN)


FAILURE = frozenset({"<failure>"})
"""What decides where the function handles a failure and leaves the lease as it is."""


class Summaries:
    """Answers, each computed once. `effects_of` ties the knot: effects ask summaries and summaries ask
    effects."""

    def __init__(self, calls: Calls, effects_of: EffectsOf) -> None:
        self.calls = calls
        self.answers: dict[Question, Answer] = {}
        self._effects_of = effects_of
        self._write_only = WriteOnly(calls.model)
        self._untouching = Untouching()

    def answer(self, question: Question) -> Answer:
        if question not in self.answers:
            self._solve_bottom_up(question)
        return self.answers[question]

    def _solve_bottom_up(self, question: Question) -> None:
        needs: dict[Question, list[Question]] = {}
        pending = [question]
        while pending:
            asked = pending.pop()
            if asked not in needs:
                needs[asked] = [each for each in needed(asked, self.calls) if each not in self.answers]
                pending += needs[asked]
        for component in _callees_first(needs):
            together = sorted(component, key=_order)
            if any(each not in self.answers for each in together):  # another may have asked meanwhile
                self._solve_component(together, needs)

    def _solve_component(self, component: list[Question], needs: Mapping[Question, list[Question]]) -> None:
        for asked in component:
            self.answers[asked] = NOTHING
        if len(component) == 1:
            self.answers[component[0]] = self._ask(component[0])
            self._suppose(component[0])
            return
        open_ones = set(component)  # of which some answer that they need has changed
        for _ in range(ROUNDS):
            for asked in [each for each in component if each in open_ones]:
                open_ones.discard(asked)
                before, self.answers[asked] = self.answers[asked], self._ask_again(asked)
                if self.answers[asked] != before:
                    open_ones |= {each for each in component if asked in needs[each]}
            if not open_ones:
                return

    def _suppose(self, asked: Question) -> None:
        """That a function which gives the lease back, or asks itself to, always does: `if not links:
        pool.put(buf)`, `else: self.walk(buf, links[1:])`. So it does where nothing but that is to be
        supposed, for sometime it comes to its end."""
        first = self.answers[asked]
        if first.fate is Fate.RELEASE and first.sometimes and asked in needed(asked, self.calls):
            self.answers[asked] = always = Answer(Fate.RELEASE)
            if self._ask_again(asked) != always:
                self.answers[asked] = first
                self._effects_of(asked.function).forget()

    def _ask_again(self, asked: Question) -> Answer:
        """Of a function that may be remembered as asking others which were not asked yet."""
        self._effects_of(asked.function).forget()
        return self._ask(asked)

    def _answers_with_memory(self, question: Question) -> bool:
        """`project(stage: Stage, weight) -> Tensor`, of a class of the tree: a tensor is no stage."""
        function, told = question.function, _annotation_of(question.function, question.place[0])
        returns = getattr(function.node, "returns", None)
        if told is None or returns is None or ast.unparse(returns) not in TENSORS:
            return False
        return isinstance(type_named(self.calls.model.project, (function.module, told)), Class)

    def _ask(self, question: Question) -> Answer:
        function = question.function
        try:
            graph = function.graph
            handle = Handle.NONE if question.place == PROCESS else Handle.RESULT
            effects = self._effects_of(function)
            place = question.place
            if len(place) > 1 and place[1].startswith("."):
                asked = (function, place, effects, question.value, question.protocol)
                if self._untouching.leaves_alone(*asked):
                    return NOTHING
            telling = effects.telling(question.protocol)
            whole = place[-1] != ANY_ITEM  # what stands for an entry may be a pair that has the lease in it
            plain = whole and effects.lends_plain_memory(question.protocol)
            acquisition = Acquisition(
                question.protocol, handle, question.value, (place,), "", telling=telling, plain=plain
            )
            known = frozenset(fact for name, value in question.constants for fact in _facts(name, value))
            followed = follow_given(graph, effects, acquisition, known, EDGES["explicit"])
        except (TooLarge, TooManyStates, RecursionError):
            return NOT_TOLD
        answer = _conclude(question, followed)
        plainly = _answers_plainly(function) or self._answers_with_memory(question)
        if answer.fate is Fate.BORROW and question.value is Value.OBJECT and plainly:
            answer = replace(answer, result=None, sometimes=False, leaves=False)
        noted = answer.stored and not followed.endings.taken and answer.result is None
        return NOTHING if noted and self._write_only.keeps(function, answer.stored) else answer


def _annotation_of(function: Function, name: str) -> ast.expr | None:
    arguments = getattr(function.node, "args", None)
    told = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if arguments is not None else ()
    return next((each.annotation for each in told if each.arg == name), None)


def _answers_plainly(function: Function) -> bool:
    """`def tensor(self, name) -> bytes:`"""
    returns = getattr(function.node, "returns", None)
    return returns is not None and _NO_WAY_BACK.match(ast.unparse(returns)) is not None


def _callees_first(needs: dict[Question, list[Question]]) -> Iterable[Iterable[Question]]:
    """Each question after those that it needs; those that need one another together."""
    try:
        return [[asked] for asked in TopologicalSorter(needs).static_order()]
    except CycleError:
        import networkx as nx  # a tenth of a second, and most trees have no recursion that passes leases on

        return nx.strongly_connected_components(
            nx.DiGraph([(one, two) for one in needs for two in needs[one]])
        )


def _order(question: Question) -> tuple[str, str, Path, str]:
    return (
        question.function.module.path,
        question.function.qualname,
        question.place,
        str(sorted(question.constants, key=str)),
    )


def _facts(name: str, value: object) -> set[tuple[str, bool]]:
    return {(name, bool(value)), (f"{name} is None", value is None)}


def _callers_choice(
    question: Question, followed: Followed, ways_out: Iterable[tuple[int, Held]]
) -> frozenset[str]:
    """The parameters, if any, that decide on these ways out whether the lease is given back, or is what is
    returned.

    `if self.pool is None: return` goes with how the lease was acquired; `if quick: return` is for the
    caller to answer, and so is what became of something he passes on, `if request.cancelled: return`."""
    graph = question.function.graph
    own = set(question.function.parameters[:1]) if question.function.is_method else set()
    asked = set(graph.parameters) - own - {question.place[0]} - {name for name, _ in question.constants}
    for node, held in ways_out:
        path = shortest_path(graph, followed.solution, node, held)
        assumed = [op for station in path if isinstance(op := graph.ops[station.node], Assume)]
        together = {name for op in assumed for name in _absent_together(op, question.place[0])}
        names = {name for op in assumed for name in op.names} - together
        fields = {name for name in names if name.startswith(".")}
        arranged = not names.isdisjoint({*own, question.place[0]}) or not all(map(HAPPENED.search, fields))
        if names & asked and not (fields and arranged):
            return frozenset(names & asked)
        if not assumed and _after_a_failure(question.function.graph, path, followed.endings.released):
            return FAILURE
    return frozenset()


def _after_a_failure(graph: Graph, path: Iterable[Station], released: Container[int]) -> bool:
    """`except OSError: return`, where what failed was the work with the lease and not its end."""
    failed = [station.node for station in path if station.edge in RAISING]
    return bool(failed) and all(isinstance(graph.ops[node], Call) and node not in released for node in failed)


def _absent_together(op: Assume, lease: str) -> frozenset[str]:
    """`if cursor is None or connection is None: return`: what is asked for in one breath with the lease comes
    with it, and is there where the lease is."""
    match op.at:
        case ast.BoolOp(op=ast.Or(), values=values) if op.value:
            absent = [said_absent(value) for value in values]
            return frozenset(filter(None, absent)) if lease in absent and None not in absent else frozenset()
    return frozenset()


def said_absent(test: ast.expr) -> str | None:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
            return name
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            return name
    return None


def _tabled(question: Question, followed: Followed) -> tuple[Path, ...]:
    """Where `self.active[key] = row; return row` has put it, wherever it is returned."""
    endings, own = followed.endings, question.place
    elsewhere = {(node, path) for node, path in endings.beside if path[: len(own)] != own}
    put = {(node, path) for node, path in elsewhere if path[0] not in (RESULT[0], own[0]) and len(path) > 1}
    everywhere = {node for node, _ in put} >= endings.returned.keys()
    return tuple(sorted({path for _, path in put})) if everywhere else ()


def _left_in_place(question: Question, followed: Followed) -> Iterator[tuple[int, Held]]:
    """Where a lease that lies in what the function is told lies there still, and nowhere else."""
    place = question.place
    for node, op in enumerate(question.function.graph.ops):
        if isinstance(op, Leave) and op.way is not Way.RAISE and len(place) > 1:
            for held in followed.solution.states.get(node, ()):
                if held.places and all(path[: len(place)] == place for path in held.places | held.maybe):
                    yield node, held


def _gives_up(question: Question) -> bool:
    """`self.owned = False` before `return self.pages`: whoever gets them has them from now on, and
    `if self.owned:` says so to the object's other methods."""
    function, own = question.function, question.place[0]
    lowered = {
        field
        for target, value in assignments(function)
        if isinstance(value, ast.Constant) and value.value is False
        if (field := own_attribute(target, own)) is not None
    }
    others = function.cls.methods.values() if function.cls is not None and lowered else ()
    return len(question.place) > 1 and any(
        isinstance(node, ast.If) and own_attribute(node.test, each.owner or "") in lowered
        for each in others
        if each is not function
        for node in each.statements
    )


def _conclude(question: Question, followed: Followed) -> Answer:
    endings = followed.endings
    graph = question.function.graph
    kept = [
        (node, held)
        for _, node, held in endings.lost
        if isinstance(op := graph.ops[node], Leave) and op.way is not Way.RAISE
    ]
    elsewhere = tuple(
        sorted({path for path in endings.stored.values() if path[: len(question.place)] != question.place})
    )
    same = any(path[: len(question.place)] == question.place for path in endings.stored.values())
    if endings.released:
        decided = _callers_choice(question, followed, kept)
        left = [(node, held) for node in endings.stored for held in followed.solution.states[node]]
        kept_by = _callers_choice(question, followed, left) if same else frozenset()
        unchanged = [*kept, *((node, held) for node, held in left if same)]
        says = said_by(graph, followed.solution, unchanged)
        return Answer(
            Fate.RELEASE,
            sometimes=bool(kept or same),
            decided_by=decided,
            kept_by=kept_by,
            only_kept=same and not (elsewhere or endings.taken or endings.unknown),
            says=says,
            telling=tells_apart(graph, followed.solution, says, unchanged, True),
        )
    if elsewhere or endings.taken:
        unchanged = [*kept, *_left_in_place(question, followed)]
        says = said_by(graph, followed.solution, unchanged)
        telling = tells_apart(graph, followed.solution, says, unchanged, bool(endings.taken))
        partly = bool(kept) and not endings.taken
        refused = {node for node, path in endings.returned.items() if path == ()} - endings.stored.keys()
        back = bool(refused) and not endings.taken
        return Answer(Fate.TAKE, stored=elsewhere, says=says, telling=telling, left=partly, handed_back=back)
    if endings.unknown:
        shown = {*endings.shown.values(), *endings.returned.values()}  # `return self.buffer[:size]`
        if not (endings.unknown <= endings.shown.keys() and shown <= {(AT,), ()}):
            says = said_by(graph, followed.solution, kept)
            return Answer(
                Fate.UNKNOWN, says=says, telling=tells_apart(graph, followed.solution, says, kept, True)
            )
        return Answer(result=(AT,) if shown == {(AT,)} else (), sometimes=True)
    dropped = any(not isinstance(graph.ops[node], Leave) for _, node, _ in endings.lost)
    beside = sorted(endings.beside, key=lambda each: (each[0], -len(each[1]), each[1]))
    again = {node: path[1:] for node, path in beside if path[0] == RESULT[0]}
    in_a_row = len(question.place) > 1 and question.place[1].startswith("[")
    gives_up = bool(again) and same and _gives_up(question)
    if again and (in_a_row or gives_up):
        sometimes = again.keys() != endings.stored.keys()
        return Answer(result=min(again.values()), sometimes=sometimes, leaves=gives_up and not sometimes)
    if again and same:
        handed = min(again.values(), key=len), again.keys() != endings.stored.keys()
        if question.place[1:] != ():
            return Answer(dropped=dropped, shown=() if handed == ((), False) else None)
        return Answer(
            result=handed[0], sometimes=handed[1]
        )  # `lease.ids = lease.ids[:k]`, and it is returned
    if endings.returned and (tabled := _tabled(question, followed)):
        says = said_by(graph, followed.solution, kept)
        telling = tells_apart(graph, followed.solution, says, kept, False, frozenset(endings.returned))
        return Answer(Fate.TAKE, min(endings.returned.values()), stored=tabled, says=says, telling=telling)
    if endings.returned:
        paths = sorted(set(endings.returned.values()))
        decided = _callers_choice(question, followed, kept)
        return Answer(
            result=paths[0], sometimes=bool(kept) or len(paths) > 1, decided_by=decided, dropped=dropped
        )
    return Answer(dropped=dropped)

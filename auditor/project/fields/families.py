"""What the methods of a class, of its bases and of its subclasses do to a field that holds a lease."""

import ast
from collections import OrderedDict
from collections.abc import Iterator

from auditor.flow.effects import Acquisition, Fate, Handle
from auditor.flow.follow import EDGES, Followed, Shown, follow_given
from auditor.flow.held import Endings
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.flow.lease import Leak, Loss
from auditor.flow.limits import TooManyStates
from auditor.flow.trace import span_of
from auditor.ir.graph import TooLarge
from auditor.ir.ops import ANY_ITEM, RESULT, Call, Leave, Path, Store
from auditor.project.code.entered import ENTERS, EXITS
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project
from auditor.project.fields.asked_differently import asks_another_setting
from auditor.project.fields.asks_for_a_sibling import asks_for_a_sibling
from auditor.project.fields.asks_for_more import asks_for_more
from auditor.project.fields.ended_by_others import has_unknown_base
from auditor.project.fields.exits import (
    asks_how_it_went,
    asks_other_things,
    begins_always,
    calls_with,
    leaves_without_one,
    only_writes_with,
    overridden,
    what_decides,
)
from auditor.project.fields.exits_by_work import leaves_by_work_done
from auditor.project.fields.exits_early import leaves_early
from auditor.project.fields.flags_left_down import flags_left_down, set_at_birth
from auditor.project.fields.forgetting import CLEANUP, CLOSING, INITIAL, RESETTING, for_good
from auditor.project.fields.leading_to_ends import LeadingToEnds
from auditor.project.fields.measured_exits import measures_only
from auditor.project.fields.names_of_refillers import in_turns
from auditor.project.fields.outgrown import outgrown
from auditor.project.fields.set_by_enders import set_by_enders
from auditor.project.fields.without_its_sibling import returns_without_it
from auditor.project.fields.zero import passes_over_zero
from auditor.project.meaning.borrowers import Asks
from auditor.project.meaning.needs import Question
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.summaries import NOTHING as NOTHING_DONE
from auditor.project.meaning.summaries import Answer, EffectsOf, Summaries
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import RELEASE_WORDS, split

REMEMBERED = 256
"""So many of the last answers are kept: each lease of a class asks the same methods about the same fields."""


class Families:
    """Asks methods, by following the field from their entry on."""

    def __init__(
        self, project: Project, summaries: Summaries, effects_of: EffectsOf, recogniser: Recogniser
    ) -> None:
        self.project = project
        self.model = recogniser.calls.model
        self.summaries = summaries
        self.effects_of = effects_of
        self.recogniser = recogniser
        self.leading = LeadingToEnds(project, recogniser)
        self.left_down: dict[Class, frozenset[str]] = {}
        self.whole: dict[Path, Path] = {}
        """Where in what a container holds the lease lies, by the container's path; of one lease."""
        self._remembered: OrderedDict[tuple[Function, Acquisition, Knowledge, str], Followed | None] = (
            OrderedDict()
        )

    def family_of(self, cls: Class) -> Iterator[Function]:
        """Methods of the class, its bases and its subclasses in play; not those that are told nothing, not
        even their object."""
        for each in [*self.model.lineage(cls), *self.model.subclasses(cls)]:
            yield from (method for method in each.methods.values() if method.parameters)

    def _only_partly(self, outcome: Outcome, family: list[Function], path: Path, name: str) -> bool:
        """`__exit__` that returns before the release by the exception it is told of, or by a measure; that or
        `close` by what has nothing to do with the field; any by the truth of a number."""
        field, begun = path[1][1:], outcome.function
        for method in (each for each in family if each.qualname == name and each.parameters):
            if self._over_zero(outcome, method, path) is not None:
                return True
            ends = self.recogniser.ending_names(outcome.acquisition.protocol)
            if len(path) == 2 and (
                asks_for_more(method, begun, outcome.call, family, field, ends)
                or returns_without_it(method, field, ends)
            ):
                return True
            beside = len(path) == 2 and asks_for_a_sibling(method, begun, outcome.call, family, field)
            if beside and self._asked(outcome, method, path).sometimes:
                return True
            if not (_leaves(method) or _ends_by_name(method) or in_turns(begun.name, method.name)):
                continue
            if self._left_by_a_flag(outcome, method, path):
                return True
            if len(path) == 2 and asks_another_setting(method, begun, outcome.call, family, field):
                return True
            answer = self._asked(outcome, method, path)
            if answer.sometimes and self._ended_as_begun(outcome, family, method, path):
                continue
            if answer.sometimes and self._told_by_others(method, begun, field, ends):
                continue
            if method.name in EXITS and (
                answer.kept_by or (answer.sometimes and _exits_without(method, family, field))
            ):
                return True
            if (
                answer.sometimes
                and ANY_ITEM not in path
                and leaves_early(method, begun, outcome.call, family, field)
            ):
                return True
            if answer.sometimes and leaves_by_work_done(
                self.project, method, begun, outcome.call, path, ends
            ):
                return True
            once = len(path) == 2 and (
                begins_always(begun, outcome.call, field) or leaves_without_one(method, field)
            )
            listed = path[2:] == (ANY_ITEM,) and method.name in EXITS and begun.name in ENTERS
            if (
                answer.sometimes
                and (once or listed)
                and asks_other_things(
                    method,
                    family,
                    field,
                    outcome.call,
                    self._working(outcome, family, method, path),
                    self._borrowing(outcome, family),
                )
            ):
                return True
        return False

    def _told_by_others(self, method: Function, begun: Function, field: str, ends: frozenset[str]) -> bool:
        """What it asks another object, is set by who ends such leases."""
        tests = list(what_decides(method, method.owner or "", field))
        return set_by_enders(self.project, tests, begun, ends)

    def _working(
        self, outcome: Outcome, family: list[Function], ender: Function, path: Path
    ) -> set[Function]:
        """Methods that look at the lease, or show it to functions that are known, and leave it there; or to
        such as say that they write with it, `nic.write_local(self.region, page)`."""
        others = (each for each in family if each not in (ender, outcome.function) and each.parameters)
        return {
            each
            for each in others
            if (
                self._asked(outcome, each, path) == NOTHING_DONE
                and all(self.recogniser.calls.targets(each, c)[0] for c in calls_with(each, path[1][1:]))
            )
            or only_writes_with(each, path[1][1:])
        }

    def _borrowing(self, outcome: Outcome, family: list[Function]) -> set[str]:
        """Methods that are told one thing, and leave it to whoever told it."""
        told = ((each, each.parameters[1:]) for each in family if each.is_method)
        protocol, value = outcome.acquisition.protocol, outcome.acquisition.value
        return {
            each.name
            for each, parameters in told
            if len(parameters) == 1
            and self.summaries.answer(Question(each, (parameters[0],), value, protocol)) == NOTHING_DONE
        }

    def _ended_as_begun(self, outcome: Outcome, family: list[Function], method: Function, path: Path) -> bool:
        """`if self.enabled:` around the acquire, `if not self.enabled: return` before the release."""
        own, acquisition = method.parameters[0], outcome.acquisition
        under = frozenset((f"{own}{key}", says) for key, says in set_at_birth(outcome.under, family))
        place = (own, *self.whole.get(path, path)[1:])
        question = Question(method, place, acquisition.value, acquisition.protocol, under)
        return bool(under) and self.summaries.answer(question) == Answer(Fate.RELEASE)

    def _over_zero(self, outcome: Outcome, method: Function, path: Path) -> ast.stmt | None:
        """What it asks before it gives back a number, and 0 is false."""
        deeper = self.whole.get(path, path) != path  # `if rows:` asks for a list of them
        if not outcome.acquisition.from_zero or method.owner is None or deeper:
            return None
        names = self.recogniser.ending_names(outcome.acquisition.protocol)
        ending = [call for call in method.calls if last_name(call) in names]
        return passes_over_zero(method, path[1][1:], len(path) > 2, ending)

    def _in_force(self, cls: Class, names: list[str]) -> list[str]:
        """Without exit methods of bases in whose place the class has put its own, which asks for none."""
        inherited = [method for each in self.model.lineage(cls) for method in each.methods.values()]
        gone = {
            m.qualname
            for m in inherited
            if _leaves(m) and overridden(m, inherited) and not _is_asked_for(m, inherited)
        }
        return [name for name in names if name not in gone]

    def _of_itself(self, cls: Class, names: list[str], partly: list[str]) -> list[str]:
        """Without what a subclass puts in the place of a method that ends it on some ways only: an object of
        the class itself has the first."""
        own = {
            method.name: method for each in self.model.lineage(cls)[::-1] for method in each.methods.values()
        }
        halves = {name for name, method in own.items() if method.qualname in partly}
        heirs = [each.methods.values() for each in self.model.subclasses(cls)]
        others = {method.qualname for each in heirs for method in each if method.name in halves}
        return [name for name in names if name not in others - set(partly)]

    def _asked(self, outcome: Outcome, method: Function, path: Path) -> Answer:
        answer = self._asked_of(outcome, method, path)
        whole = self.whole.get(path, path)
        if whole == path or answer.fate in (Fate.RELEASE, Fate.TAKE) or answer.result is not None:
            return answer
        deeper = self._asked_of(outcome, method, whole)  # a record's buffer, not the record
        return deeper if deeper.fate is not Fate.BORROW else answer

    def _asked_of(self, outcome: Outcome, method: Function, path: Path) -> Answer:
        place = (method.parameters[0], *path[1:])
        acquisition = outcome.acquisition
        return self.summaries.answer(Question(method, place, acquisition.value, acquisition.protocol))

    def _left_by_a_flag(self, outcome: Outcome, method: Function, path: Path) -> bool:
        """`if self._owned:` around its release, and nobody ever sets that."""
        own, acquisition = method.parameters[0], outcome.acquisition
        down = frozenset((f"{own}.{flag}", False) for flag in self._flags_left_down(method))
        place = (own, *self.whole.get(path, path)[1:])
        question = Question(method, place, acquisition.value, acquisition.protocol, down)
        return bool(down) and self.summaries.answer(question).fate is Fate.BORROW

    def _flags_left_down(self, method: Function) -> frozenset[str]:
        cls = method.cls
        assert cls is not None
        if cls not in self.left_down:
            self.left_down[cls] = flags_left_down(self.project, list(self.family_of(cls)))
        return self.left_down[cls]

    def _ended_where_told(self, outcome: Outcome, family: list[Function], place: Path) -> bool:
        """`finish(request)` gives back what `start(request)` left in the request's own list."""
        if place[0] not in outcome.function.parameters[1:] or len(place) < 2:
            return False
        acquisition = outcome.acquisition
        questions = (
            Question(method, (told, *place[1:]), acquisition.value, acquisition.protocol)
            for method in family
            if method is not outcome.function and place[1] in method.text
            for told in method.parameters[1:]
        )
        return any(self.summaries.answer(question).fate is Fate.RELEASE for question in questions)

    def _reachable(self, method: Function, family: list[Function]) -> bool:
        """A private method counts only if the family calls it, or somebody calls it on an object that is
        not itself."""
        if not method.name.startswith("_") or method.name.startswith("__"):
            return True
        heirs = self.model.subclasses(method.cls) if method.cls is not None else ()
        if CLEANUP.fullmatch(method.name) and has_unknown_base(family, heirs):
            return True
        own = {id(other) for other in family}
        for module in self.project.parsed():
            if method.name not in module.text:
                continue
            for function in module.by_node.values():
                if function.qualname == "<module>":
                    continue
                for node in function.nodes:
                    if isinstance(node, ast.Attribute) and node.attr == method.name:
                        on_itself = isinstance(node.value, ast.Name) and node.value.id == function.owner
                        if not on_itself or id(function) in own:
                            return True
        return False

    def _ended_through(self, outcome: Outcome, attribute: str) -> Iterator[str]:
        """Functions that end it by its own method, and have its object by another name:
        `tier.pool.shutdown()`."""
        for module in self.project.parsed():
            if f".{attribute}." not in module.text:
                continue
            for function in module.by_node.values():
                if f".{attribute}." in function.text and self._ends_through(outcome, function, attribute):
                    yield function.qualname

    def _ends_through(self, outcome: Outcome, function: Function, attribute: str) -> bool:
        try:
            ops = function.graph.ops
        except (TooLarge, RecursionError):
            return False
        effects, own = self.effects_of(function), function.owner
        value, protocol = outcome.acquisition.value, outcome.acquisition.protocol
        return any(
            isinstance(op, Call)
            and op.receiver is not None
            and op.receiver[-1] == f".{attribute}"
            and op.receiver != (own, f".{attribute}")
            and effects.treatment(op, -1, (), value, protocol).fate is Fate.RELEASE
            for op in ops
        )

    def _drops(self, method: Function, place: Path, acquisition: Acquisition) -> Iterator[Leak]:
        """Where a container's entries are thrown away: `clear()`, or another container put in its place."""
        endings = self._from_entry(method, place, acquisition)
        for loss, node, _ in endings.lost if endings is not None else ():
            op = method.graph.ops[node]
            if loss in (Loss.DROPPED, Loss.OVERWRITTEN) and not isinstance(op, Leave):
                how = op.method if isinstance(op, Call) else ""
                yield Leak(loss, span_of(method.module.path, op.at, method.module.lines), how, ())

    def _resets(self, outcome: Outcome, method: Function) -> bool:
        """`reset()` of an object that goes on: what a pool of the tree lent it is forgotten, unless somebody
        gives it back and calls that afterwards."""
        lent = not outcome.acquisition.foreign
        return lent and RESETTING.fullmatch(method.name) is not None and for_good(self.project, method)

    def _left_open(self, outcome: Outcome, path: Path) -> bool:
        """`with` stores it, and leaving the `with` does not give it back, so that the next one loses it."""
        assert outcome.function.cls is not None
        exits = [method for method in self.family_of(outcome.function.cls) if method.name in EXITS]
        answers = [self._asked(outcome, method, path) for method in exits]
        return bool(answers) and all(answer.fate is Fate.BORROW for answer in answers)

    def _lets_go(self, method: Function, place: Path, acquisition: Acquisition) -> bool:
        """What is there when the method begins is lost, or a piece of it is kept: `new.size = old.size`."""
        endings = self._from_entry(method, place, acquisition)
        if endings is None:
            return False
        return bool(endings.lost) or any(
            isinstance(method.graph.ops[node], Store) for node in endings.unknown
        )

    def _outgrown(self, outcome: Outcome, path: Path) -> bool:
        """Nobody but the field has it, and it is lost where another one is made because it does no more."""
        function = outcome.function
        assert function.cls is not None
        family = list(self.family_of(function.cls))
        others = {place[:2] for place in outcome.beside} - {path[:2], RESULT}
        declared = outcome.acquisition.foreign
        if others or ANY_ITEM in path or function.name in INITIAL:
            return False
        if not outgrown(function, path[1][1:], family, declared):
            return False
        place = (function.parameters[0], *path[1:])
        found = self._drops(function, place, outcome.acquisition)
        return any(drop.loss is Loss.OVERWRITTEN for drop in found)

    def _from_entry(self, method: Function, place: Path, acquisition: Acquisition) -> Endings | None:
        """How the method ends what is there when it begins, without any exception."""
        followed = self._followed(method, place, acquisition)
        return followed.endings if followed is not None else None

    def _followed(
        self, method: Function, place: Path, acquisition: Acquisition, known: Knowledge = NOTHING
    ) -> Followed | None:
        return self.followed_all(method, (place,), acquisition, known)

    def followed_all(
        self,
        method: Function,
        places: tuple[Path, ...],
        acquisition: Acquisition,
        known: Knowledge = NOTHING,
        edges: str = "none",
    ) -> Followed | None:
        """The same of a lease that all these places lead to, by these edges."""
        given = Acquisition(
            acquisition.protocol,
            Handle.RESULT,
            acquisition.value,
            places,
            "",
            telling=acquisition.telling,
        )
        asked = method, given, known, edges
        if asked in self._remembered:
            self._remembered.move_to_end(asked)
        else:
            self._remembered[asked] = self._follow_given(*asked)
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return self._remembered[asked]

    def _follow_given(
        self, method: Function, given: Acquisition, known: Knowledge, edges: str
    ) -> Followed | None:
        try:
            lent = Shown(self._lent_by(method))
            return follow_given(method.graph, self.effects_of(method), given, known, EDGES[edges], lent)
        except (TooLarge, TooManyStates, RecursionError):
            return None

    def _lent_by(self, method: Function) -> frozenset[int]:
        """Its calls of those that are known to have only borrowed such a thing."""
        borrowers = self.recogniser.borrowers
        asks = Asks(method, self.recogniser.calls)
        calls = (node for node, op in enumerate(method.graph.ops) if borrowers and isinstance(op, Call))
        return frozenset(node for node in calls if asks.a_borrower(node, borrowers))


def _is_asked_for(method: Function, inherited: list[Function]) -> bool:
    """`super().close()` in all that stand before it, on whatever way."""
    alike = [each for each in inherited if each.name == method.name]
    return all(
        f"super().{method.name}(" in each.text
        and not any(isinstance(node, ast.Return | ast.If) for node in each.statements)
        for each in alike[: alike.index(method)]
    )


def _leaves(method: Function) -> bool:
    """Nobody uses the object afterwards."""
    return method.name in EXITS or CLOSING.fullmatch(method.name) is not None


def _ends_by_name(method: Function) -> bool:
    """`shut()`, `drop_pad()`."""
    return not method.name.startswith("_") and split(method.name)[0] in RELEASE_WORDS | {"shut"}


def _exits_without(method: Function, family: list[Function], field: str) -> bool:
    return measures_only(method, family, field) or asks_how_it_went(method, family, field)

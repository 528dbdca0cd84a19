"""Finds the classes of the tree whose objects hold something open until they are told to close it."""

import ast
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import replace

from auditor.flow.effects import Fate, Handle
from auditor.flow.lease import EXCEPTIONAL, Loss
from auditor.ir.ops import Path
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.class_model import ClassModel
from auditor.project.code.field_paths import own_field
from auditor.project.code.modules import Class, Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.ended_by_others import has_unknown_base
from auditor.project.fields.forgetting import CLOSING
from auditor.project.leases.belief import never_closed
from auditor.project.leases.kept_marks import kept_marks
from auditor.project.leases.known_to_nobody import elements
from auditor.project.meaning.needs import Question
from auditor.project.meaning.opener import Opener, ends_with_the_process
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.summaries import Answer, Summaries
from auditor.project.outcome import Outcome
from auditor.project.pools.lent_objects import comes_back_when_dropped, needs_nothing
from auditor.project.shapes.pool_state import called
from auditor.protocols.vocabulary import LEASE_METHODS

ENDS = frozenset({"aclose", "quit", "logout", "end", "drop", "leave"})
"""Names of methods that end an object, besides those by which fields are closed."""


def openers(
    outcomes: Iterable[Outcome],
    model: ClassModel,
    summaries: Summaries,
    pools: Set[Class],
    ending: Callable[[str], Set[str]],
) -> dict[Class, Opener]:
    """Found by what was stored: each class of the tree that opens something of a field's length of life.
    `ending` are the names of what ends a lease of a protocol."""
    found: dict[Class, Opener] = {}
    for outcome in outcomes:
        cls = outcome.function.cls
        if cls is None or _ends_itself(model, cls):
            continue
        if cls in pools and not outcome.acquisition.foreign:
            continue  # its own stock
        if outcome.acquisition.handle is not Handle.RESULT:
            for kept, method in kept_marks(outcome, ending(outcome.acquisition.protocol)):
                if _is_an_end(method) or needs_nothing(method):
                    made = found.setdefault(cls, Opener(cls, set(), {"__init__"}, set()))
                    made.fields.add(kept)
                    made.closing.add(method)
            continue
        for field in _filled(outcome):
            fates = _fates(outcome, field, model, summaries)
            ends = ending(outcome.acquisition.protocol)
            closing = {method for method, answer in fates.items() if _closes(method, answer, field, ends)}
            if closing:
                by_and_by = len(field) > 1 and not _filled_at_once(outcome.function, field[0][1:])
                made = found.setdefault(cls, Opener(cls, set(), set(), set()))
                if outcome.function.name == "__init__":
                    unless = outcome.unless | _decided_by_default(outcome)
                    made.unless = unless if "__init__" not in made.opening else made.unless & unless
                made.fields.add(field[0][1:])
                made.closing |= closing
                made.closing |= {each for each in fates if by_and_by and _takes_some(fates[each])}
                made.opening |= _leading_to(outcome.function.name, model, cls)
                if outcome.function.name == "__post_init__":
                    made.opening.add("__init__")  # which the decorator writes
    return found


def made_as(openers: Mapping[Class, Opener], model: ClassModel) -> set[str]:
    """Names of the classes by which such objects are made, and of the methods that open them."""
    names = {each.name for cls in openers for each in (cls, *model.subclasses(cls))}
    return names.union(*(opener.opening for opener in openers.values())) - {"__init__"}


def _filled(outcome: Outcome) -> Iterator[Path]:
    """Fields of the method's own object in which it leaves the lease, unless a parameter decides; but that
    of `Store(file)`, which may be given one, where it is None by default."""
    if not outcome.stored or not _is_for_who_brings_none(outcome):
        return
    for path in sorted({*(path for _, path in outcome.stored), *outcome.beside}):
        if path[2:3] in ((), ("[*]",)) and own_field(outcome.function, path):
            yield path[1:]


def _is_for_who_brings_none(outcome: Outcome) -> bool:
    if not (outcome.unless or outcome.asked):
        return True
    asked, decided = {name.partition(" ")[0] for name, _ in outcome.asked}, _decided_by_default(outcome)
    known = bool(outcome.unless or decided)
    return outcome.function.name == "__init__" and known and asked <= outcome.unless | decided


def _decided_by_default(outcome: Outcome) -> frozenset[str]:
    """`lazy` of `__init__(self, host, lazy=False)` and `if not lazy: self.line = pool.dial(host)`: whoever
    does not say has dialled."""
    arguments = getattr(outcome.function.node, "args", None)
    if not isinstance(arguments, ast.arguments):
        return frozenset()
    places = (*arguments.posonlyargs, *arguments.args)
    given = zip(reversed(places), reversed(arguments.defaults), strict=False)
    defaults = {arg.arg: value.value for arg, value in given if isinstance(value, ast.Constant)}
    return frozenset(
        name for name, truth in outcome.asked if name in defaults and bool(defaults[name]) == truth
    )


def _filled_at_once(function: Function, field: str) -> bool:
    """At birth, or `self.beams = [Beam(pages)]`: what is put into a table by and by may go one by one, and
    who takes some out of it may have taken all."""
    own = function.owner or ""
    return function.name == "__init__" or any(
        own_attribute(target, own) == field for target, _ in assignments(function)
    )


def _fates(outcome: Outcome, field: Path, model: ClassModel, summaries: Summaries) -> dict[Function, Answer]:
    """What the methods of the class do to what lies in the field."""
    cls, acquisition = outcome.function.cls, outcome.acquisition
    assert cls is not None
    methods = (method for each in model.lineage(cls) for method in each.methods.values())
    return {
        method: summaries.answer(Question(method, (own, *field), acquisition.value, acquisition.protocol))
        for method in methods
        if (own := method.owner) is not None and method is not outcome.function
    }


def _closes(method: Function, answer: Answer, field: Path, ends: Set[str]) -> bool:
    """It is called like an end, or is told nothing and leaves the field empty, and releases what is there."""
    if answer.fate is not Fate.RELEASE:
        return _is_an_end(method) and _goes_over_names(method, field[0][1:], ends)
    return _is_an_end(method) or (needs_nothing(method) and not _fills(method, field[0][1:]))


def _goes_over_names(method: Function, field: str, ends: Set[str]) -> bool:
    """`for name in ("front", "back"): self.bank.reclaim(getattr(self, name))`"""
    named = any(isinstance(node, ast.Constant) and node.value == field for node in method.nodes)
    gives_back = any(looks_releasing(call) or last_name(call) in ends for call in method.calls)
    return named and gives_back and "getattr" in called(method)


def _fills(method: Function, field: str) -> bool:
    """`self.page = self.pool.exchange(self.page)`; not `self.page = None`, nor `self.slot = -1`"""
    own = method.owner or ""
    put = (value for target, value in assignments(method) if own_attribute(target, own) == field)
    signless = (value.operand if isinstance(value, ast.UnaryOp) else value for value in put)
    return not all(isinstance(value, ast.Constant) or elements(value) == [] for value in signless)


def _is_an_end(method: Function) -> bool:
    own_end = method.name in ENDS | LEASE_METHODS and needs_nothing(method)
    return own_end or CLOSING.fullmatch(method.name) is not None


def _takes_some(answer: Answer) -> bool:
    return answer.fate is not Fate.BORROW or answer.result is not None


def _ends_itself(model: ClassModel, cls: Class) -> bool:
    """When it is dropped, or by a base that was not found."""
    family = [method for each in model.lineage(cls) for method in each.methods.values()]
    return (
        any(method.name == "__del__" or comes_back_when_dropped(method) for method in family)
        or any(keyword.arg == "metaclass" for keyword in cls.node.keywords)
        or has_unknown_base(family)
    )


def _leading_to(opening: str, model: ClassModel, cls: Class) -> set[str]:
    """The method, and those that call it on the same object."""
    classes = [*model.lineage(cls), *model.subclasses(cls)]
    family = [method for each in classes for method in each.methods.values()]
    found, waiting = {opening}, [opening]
    while waiting:
        name = waiting.pop()
        callers = {
            method.name for method in family if any(_is_own(method, call, name) for call in method.calls)
        }
        waiting += callers - found
        found |= callers
    return found


def _is_own(method: Function, call: ast.Call, name: str) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id=owner), attr=attr):
            return attr == name and owner == method.owner
    return False


def keep_lost(outcomes: dict[int, Outcome]) -> None:
    """Of such objects those are left that are lost with nothing raised, or by what is raised in so many
    words: that whatever call fails closes the client is seldom meant; and for now those in fields, over
    which another may be put. Those that nearly nobody closes are not meant to be."""
    unclosed = never_closed(outcomes.values())
    for key, outcome in list(outcomes.items()):
        if outcome.acquisition.opened:
            meant = EXCEPTIONAL - {Loss.RAISE}
            leaks = tuple(leak for leak in outcome.lease.leaks if leak.loss not in meant)
            outcome.lease = replace(outcome.lease, leaks=leaks)
            meant_open = outcome.acquisition.protocol in unclosed
            if meant_open or not (leaks or outcome.stored) or ends_with_the_process(outcome.function):
                del outcomes[key]


def without_kept(outcomes: Mapping[int, Outcome], lost: Container[int]) -> dict[int, Outcome]:
    """Without such objects that their keeper may keep as long as it lives. `lost` are the calls, by id, that
    a field was filled by which loses what it holds."""
    return {
        key: each
        for key, each in outcomes.items()
        if not each.acquisition.opened or each.lease.leaks or id(each.call) in lost
    }

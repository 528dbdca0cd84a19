"""An entry that holds several leases by constant keys, of which its end forgets one: `open(key)` enters
`{"cross": lane, "bias": other}`, and `close(key)` takes the entry out and gives back `entry["cross"]`."""

from collections.abc import Callable, Iterator, Sequence

from auditor.flow.effects import Fate
from auditor.flow.lease import Field, StoredField
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.field_paths import mentions, own_field
from auditor.project.code.modules import Function
from auditor.project.fields.reckoning import takes_out
from auditor.project.meaning.summaries import Answer
from auditor.project.outcome import Outcome

Ask = Callable[[Outcome, Function, Path], Answer]


def part_forgotten(
    outcome: Outcome, others: Sequence[Outcome], family: Sequence[Function], asked: Ask
) -> Iterator[StoredField]:
    """Where no method of the class gives this one back or hands it on, whatever it does with the entry."""
    filling = outcome.function
    for path in dict.fromkeys(path for _, path in outcome.stored):
        if filling.cls is None or not own_field(filling, path) or not _by_constant_key(path):
            continue
        asking = [each for each in family if each is not filling and mentions(each, path[1][1:])]
        if not all(_is_left_alone(each, asked(outcome, each, path)) for each in asking):
            continue
        beside = [(other, its) for other in others for its in _lying_beside(other, outcome, path)]
        for method in asking:
            if takes_out(method, path[1][1:]) and any(
                asked(other, method, its).fate is Fate.RELEASE for other, its in beside
            ):
                field = Field(filling.cls.qualname, "".join(path[1:])[1:])
                yield StoredField(field, outcome.lease.span, partly_by=(method.qualname,))
                return


def _by_constant_key(path: Path) -> bool:
    return len(path) == 4 and path[2] == ANY_ITEM and path[3] != ANY_ITEM and path[3].startswith("[")


def _lying_beside(other: Outcome, outcome: Outcome, path: Path) -> Iterator[Path]:
    if other.function is outcome.function and other is not outcome:
        yield from (its for _, its in other.stored if its[:3] == path[:3] and its[3:] != path[3:])


def _is_left_alone(method: Function, answer: Answer) -> bool:
    """It stays where it is, or in an entry that the method alone has in its hands."""
    if answer.fate is Fate.TAKE:
        at_hand = {place[0] for place in answer.stored} - {*method.parameters}
        return answer.result is None and bool(at_hand) and at_hand == {place[0] for place in answer.stored}
    return answer.fate is Fate.BORROW and answer.result is None

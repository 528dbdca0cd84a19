"""An entry that holds several leases by constant keys, of which its end forgets one: `open(key)` enters
`{"cross": lane, "bias": other}`, and `close(key)` takes the entry out and gives back `entry["cross"]`."""

import ast
from collections.abc import Callable, Iterator, Sequence, Set

from auditor.flow.effects import Fate
from auditor.flow.lease import Field, StoredField
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.field_paths import mentions, own_field
from auditor.project.code.modules import Function
from auditor.project.fields.reckoning import takes_out
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.summaries import Answer
from auditor.project.outcome import Outcome

Ask = Callable[[Outcome, Function, Path], Answer]


def part_forgotten(
    outcome: Outcome, others: Sequence[Outcome], family: Sequence[Function], asked: Ask, ends: Set[str]
) -> Iterator[StoredField]:
    """Where no method of the class gives this one back or hands it on, whatever it does with the entry, and
    none gives back what it is told."""
    filling = outcome.function
    if any(_ends_what_it_is_told(each, ends) for each in family):
        return
    for path in dict.fromkeys(path for _, path in outcome.stored):
        if filling.cls is None or not own_field(filling, path) or not _by_constant_key(path):
            continue
        if any(place[:3] != path[:3] for place in outcome.beside):
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


def _ends_what_it_is_told(method: Function, ends: Set[str]) -> bool:
    """`def done_with(self, sheets): self.sheets.take_in(sheets)`"""
    told = method.parameters[1:]
    return any(
        last_name(call) in ends and any(getattr(given, "id", None) in told for given in call.args)
        for call in method.calls
    )


def _by_constant_key(path: Path) -> bool:
    return len(path) == 4 and path[2] == ANY_ITEM and path[3] != ANY_ITEM and path[3].startswith("[")


def _lying_beside(other: Outcome, outcome: Outcome, path: Path) -> Iterator[Path]:
    if other.function is outcome.function and other is not outcome:
        yield from (its for _, its in other.stored if its[:3] == path[:3] and its[3:] != path[3:])


def _is_left_alone(method: Function, answer: Answer) -> bool:
    """It stays where it is, or in an entry that the method alone has in its hands and only looks into."""
    if answer.fate is Fate.TAKE:
        names = {place[0] for place in answer.stored}
        known = bool(names) and names.isdisjoint(method.parameters)
        return known and answer.result is None and all(_only_looks_into(method, name) for name in names)
    return answer.fate is Fate.BORROW and answer.result is None


def _only_looks_into(method: Function, name: str) -> bool:
    """`entry["cross"]`, `if entry is not None`: nobody else gets the whole entry."""
    looked = {
        id(part)
        for node in method.nodes
        if isinstance(node, ast.Subscript | ast.Attribute | ast.Compare | ast.If | ast.UnaryOp)
        for part in ast.iter_child_nodes(node)
    }
    reads = (
        node
        for node in method.nodes
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    )
    return all(id(node) in looked for node in reads)

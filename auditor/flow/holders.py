"""Places of what was computed from a lease (tensors with a graph, handles of transfers), as operations move
them."""

from auditor.flow.aliases import is_piece
from auditor.ir.ops import (
    ANY_ITEM,
    Await,
    Constant,
    Delete,
    EndStatement,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
    is_temporary,
)

Places = frozenset[Path]


def held_in(places: Places, operand: Path) -> bool:
    """Whether the operand is, contains or is a piece of what is at one of the places."""
    return any(
        _alike(place, operand) and (len(operand) <= len(place) or is_piece(operand[len(place) :]))
        for place in places
    )


def _alike(one: Path, other: Path) -> bool:
    return all(a == b or (a[0] == b[0] == "[") for a, b in zip(one, other, strict=False))


def moved(places: Places, op: Op) -> Places:
    """The places after an operation that computes nothing."""
    if not places:
        return places
    match op:
        case Move(target=target, source=source) | Await(target=target, source=source):
            return bound(places, target, held_in(places, source)) if target != source else places
        case Make(target=target, items=items):
            return bound(places, target, any(held_in(places, path) for _, path in items))
        case Unpack(targets=targets, source=source):
            holds = held_in(places, source)
            for _, target in targets:
                places = bound(places, target, holds)
        case Next(target=target, source=source):
            return bound(places, target, held_in(places, (*source, ANY_ITEM)))
        case Store(target=target, source=source, sliced=sliced):
            if held_in(places, source):
                return places | {target[:-1] if sliced or target[-1].startswith("[") else target}
        case Constant(target=target) | Delete(target=target):
            return bound(places, target, False)
        case EndStatement():
            return frozenset(place for place in places if not is_temporary(place))
    return places


def bound(places: Places, target: Path, holds: bool) -> Places:
    kept = frozenset(place for place in places if place[: len(target)] != target)
    return kept | {target} if holds else kept

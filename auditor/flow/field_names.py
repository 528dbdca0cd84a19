"""Local names of what lies in fields: `target = lease.storage`."""

from collections.abc import Sequence, Set

from auditor.ir.ops import Constant, Move, Next, Op, Path, Unpack


def names_of_fields(ops: Sequence[Op], parameters: Set[str]) -> frozenset[Path]:
    """Names that mean nothing but a field of something, or, on other ways, a parameter, an element or a
    constant."""
    sources: dict[Path, set[Path]] = {}
    others: set[Path | None] = set()
    elements: set[Path] = set()
    for op in ops:
        match op:
            case Move(target=target, source=source, part="") if len(target) == 1:
                sources.setdefault(target, set()).add(source)
            case Unpack(targets=targets):
                others.update(target for _, target in targets)
            case Next(target=target):
                elements.add(target)
            case Constant():
                pass
            case _:
                others.add(getattr(op, "target", None))
    known: set[Path] = set()
    while True:
        more = {
            name
            for name, given in sources.items()
            if name not in others
            and any(_is_field(each) or each in known for each in given)
            and all(_is_field(each) or each in known | elements or each[0] in parameters for each in given)
        }
        if more <= known:
            return frozenset(known)
        known |= more


def _is_field(path: Path) -> bool:
    return path[-1].startswith(".")

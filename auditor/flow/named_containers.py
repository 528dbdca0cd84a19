"""Local names of containers that lie in fields: `idle = self.idle`, `row = self.rows[key]`, and what
`self.rows.setdefault(key, [])` answers. What is taken out under the name is out of the field as well."""

from collections.abc import Iterator, Mapping, Sequence

from auditor.ir.ops import ANY_ITEM, Call, Move, Next, Op, Path, Unpack

ANSWERING = frozenset({"get", "setdefault"})
"""Methods of a table that answer what lies in it, and leave it there."""


def named_containers(ops: Sequence[Op]) -> Mapping[Path, Path]:
    """By the name, where nothing else is ever called so."""
    found: dict[Path, set[Path | None]] = {}
    for name, source in _bindings(ops):
        found.setdefault(name, set()).add(source)
    sure: dict[Path, Path] = {}
    for name, sources in found.items():
        source = next(iter(sources))
        if len(sources) == 1 and source is not None:
            sure[name] = source
    return {name: place for name in sure if len(place := _resolved(sure, name)) > 1}


def _bindings(ops: Sequence[Op]) -> Iterator[tuple[Path, Path | None]]:
    for op in ops:
        match op:
            case Move(target=(_,) as target, source=source):
                yield target, _of_any(source)
            case Call(target=(_,) as target, receiver=(_, *_) as table, method=method):
                answers = method in ANSWERING and len(op.args) > 0
                yield target, (*_of_any(tuple(table)), ANY_ITEM) if answers else None
            case Unpack(targets=targets):
                yield from ((target, None) for _, target in targets)
            case Next(target=target):
                yield target, None
            case _:
                if len(target := getattr(op, "target", ())) == 1:
                    yield target, None


def _of_any(path: Path) -> Path:
    return tuple(ANY_ITEM if piece.startswith("[") else piece for piece in path)


def _resolved(sure: Mapping[Path, Path], name: Path) -> Path:
    """`row` of `rows = self.rows` and `row = rows[key]` is an item of the field."""
    seen = {name}
    place = sure[name]
    while place[:1] in sure and place[:1] not in seen:
        seen.add(place[:1])
        place = (*sure[place[:1]], *place[1:])
    return place

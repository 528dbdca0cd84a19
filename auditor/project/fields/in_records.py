"""Records that hold several leases, of which whoever ends them gives back some and forgets one: the pages of
a chunk, and never its slot."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from auditor.flow.lease import Field, StoredField
from auditor.ir.ops import RESULT, Path
from auditor.project.code.bindings import (
    assignments,
    given_to,
    own_attribute,
    told_by_position,
)
from auditor.project.code.class_model import ClassModel
from auditor.project.code.field_paths import own_field
from auditor.project.code.kept_as_told import field_told, fields_of, is_tuple
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.elsewhere import released_attributes
from auditor.project.fields.in_others import Uses
from auditor.project.meaning.recognise import Recogniser
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk

WHOLE = re.compile(r"\b(?:astuple|asdict|_asdict|vars)\(|\.__dict__\b|\*\*\w+\.|__iter__")
"""Ways by which a record's fields are read without their names."""


@dataclass(frozen=True, slots=True)
class Part:
    """The field of a record that an acquire goes into, if `alone` nowhere else. `made` makes the record."""

    record: Class
    field: str
    outcome: Outcome
    tables: frozenset[str]
    alone: bool
    made: ast.Call | None = None


class Records:
    """All records that leases were put into."""

    def __init__(self, project: Project, model: ClassModel, recogniser: Recogniser) -> None:
        self.project = project
        self.model = model
        self.recogniser = recogniser

    def forgotten(self, outcomes: Iterable[Outcome]) -> Iterator[tuple[Outcome, StoredField]]:
        own = (each for each in outcomes if not each.acquisition.foreign)
        parts = [part for outcome in own for part in self.parts(outcome)]
        for part in (each for each in parts if each.alone):
            enders = [
                (function, each.field)
                for each in parts
                if _lies_beside(each, part)
                for function in self._ending(each, each.field)
            ]
            given = any(_is_given_whole(*each) for each in enders)
            if enders and not given and self._nobody_hands_on(part):
                field = Field(part.record.qualname, part.field, part.record.name)
                yield part.outcome, StoredField(field, part.outcome.lease.span)

    def parts(self, outcome: Outcome, *, handed_out: bool = False) -> Iterator[Part]:
        """`Chunk(pages, self.slots.borrow())`, `Chunk(pages=pages, ...)`: told of the lease, once. What the
        caller gets is his to end, and counts only where it is asked for what is `handed_out`."""
        acquisition, function, lease = outcome.acquisition, outcome.function, outcome.lease
        known = acquisition.keyed or acquisition.inner
        kept = any(own_field(function, path) for path in outcome.beside)
        others = outcome.returned is not None and not (kept or handed_out)
        if known or others or function.is_context_manager:
            return
        told = [
            (made, position)
            for made in function.calls
            for position, value in told_by_position(made)
            for given in [value.value if isinstance(value, ast.Await) else value]
            if given is outcome.call or (lease.holder and getattr(given, "id", "") == lease.holder)
        ]
        alone = not told or (len(told) == 1 and _goes_nowhere_else(function, lease.holder, told[0][0]))
        making = [
            (made, record, where)
            for made, where in told
            if isinstance(record := self._callee(function, made), Class)
        ]
        call: ast.Call | None = None
        if len(making) == 1:
            call, record, position = making[0]
            field = self._field(record, position)
        else:
            record, field = self._put_in(outcome) if not told else (None, None)
        if isinstance(record, Class) and field is not None:
            places = {*(path for _, path in outcome.stored), *outcome.beside}
            if all(path[-1] == f".{field}" for path in places if path[:1] != RESULT):
                yield Part(record, field, outcome, frozenset(_tables(function, places)), alone, call)

    def _callee(self, function: Function, made: ast.Call) -> object:
        """Also of `cls(pool, box)` in a class method."""
        if "classmethod" in function.decorators and getattr(made.func, "id", "") == function.owner:
            return function.cls
        return self.model.callee(function, made.func)

    def _put_in(self, outcome: Outcome) -> tuple[object, str | None]:
        """`frame = Frame(number)`, and `frame.preview = buffers.rent()`."""
        function = outcome.function
        for target, value in assignments(function):
            match target:
                case ast.Attribute(value=ast.Name(id=name), attr=field) if value is outcome.call:
                    made = list(given_to(function, name))
                    if len(made) == 1 and isinstance(made[0], ast.Call) and name not in function.parameters:
                        return self.model.callee(function, made[0].func), field
        return None, None

    def _field(self, record: Class, position: int | str) -> str | None:
        """Where the record keeps the argument, if it does no more with it."""
        init = self.model.method(record, "__init__")
        if init is None:
            kept = field_told(self.model, record, position)
            return kept[1:] if kept[1:] in fields_of(self.model, record) else None
        names = init.parameters[1:]
        name = position if isinstance(position, str) else next(iter(names[position : position + 1]), None)
        for node in init.statements:
            match node:
                case ast.Assign(targets=[target], value=ast.Name(id=value)) if value == name:
                    return own_attribute(target, init.owner or "")
        return None

    def ending(self, part: Part) -> Iterator[Function]:
        return self._ending(part, part.field)

    def _ending(self, part: Part, field: str) -> Iterator[Function]:
        """Functions that give back what is in a field so named, of such an object."""
        names = self.recogniser.ending_names(part.outcome.acquisition.protocol)
        for function in self._speaking(field):
            known = {call for call in function.calls if getattr(call.func, "attr", "") in names}
            if field in released_attributes(function, function.cls is not part.record, known):
                yield function

    def _nobody_hands_on(self, part: Part) -> bool:
        """All that the tree does with such a field is to work with it."""
        quoted = re.compile(rf"[\"']{part.field}[\"']")
        named = re.compile(rf"\.{part.field}\b")
        read = {module.path: module for module in self.project.parsed()}
        unread = (text for path, text in self.project.mentioning(part.field) if path not in read)
        texts = [module.text for module in read.values() if part.record.name in module.text]
        if any(named.search(text) for text in unread) or any(map(WHOLE.search, texts)):
            return False
        if any(quoted.search(text) for text in texts) or self._taken_apart(part.record):
            return False
        return all(
            Uses(function, frozenset(_of_other_tables(function, part))).only_works(part.field)
            for function in self._speaking(part.field)
        )

    def _taken_apart(self, record: Class) -> bool:
        """`pages, slot = self.windows.pop(key)`"""
        count = len(fields_of(self.model, record))
        return is_tuple(self.model, record) and any(
            isinstance(target, ast.Tuple) and len(target.elts) == count
            for function in record.module.by_node.values()
            for target, _ in assignments(function)
        )

    def _speaking(self, field: str) -> Iterator[Function]:
        for module in self.project.parsed():
            for function in list(module.by_node.values()) if f".{field}" in module.text else ():
                spoken = f".{field}" in function.text and function.qualname != "<module>"
                if spoken and not _has_such_a_method(function, field):
                    yield function


def _has_such_a_method(function: Function, field: str) -> bool:
    """`with self.session() as s:` is about no record's field."""
    named = [node for node in function.nodes if isinstance(node, ast.Attribute) and node.attr == field]
    has = function.cls is not None and field in function.cls.methods
    return has and all(own_attribute(node, function.owner or "") == field for node in named)


def _lies_beside(one: Part, other: Part) -> bool:
    """In another field of such a record, or elsewhere in the same table of such an object."""
    together = one.outcome.function.cls is other.outcome.function.cls and one.tables & other.tables
    return one.field != other.field and (one.record is other.record or bool(together))


def _is_given_whole(ender: Function, field: str) -> bool:
    """`self.pages.free(chunk.pages)`, and `self.slots.release(chunk)`: that may find the slot there."""
    records = {
        node.value.id
        for node in walk(ender.node)
        if isinstance(node, ast.Attribute) and node.attr == field and isinstance(node.value, ast.Name)
    }
    return any(
        looks_releasing(call) and getattr(argument, "id", None) in records
        for call in ender.calls
        for argument in call.args
    )


def _goes_nowhere_else(function: Function, holder: str, made: ast.Call) -> bool:
    """Beside being worked with, `memory[slot].zero_()`."""
    told = {id(each) for each in walk(made)}
    return not holder or (holder.isidentifier() and Uses(function, frozenset(), told).only_works_with(holder))


def _tables(function: Function, places: Iterable[Path]) -> Iterator[str]:
    """Fields of the function's own object that the record lies in."""
    return (path[1][1:] for path in places if path[0] == function.owner and len(path) > 2)


def _of_other_tables(function: Function, part: Part) -> Iterator[str]:
    """Names that the function has from other tables of its object than those which this record lies in."""
    own = function.owner or ""
    if not part.tables or function.cls is not part.outcome.function.cls:
        return
    for name in {node.id for node in function.nodes if isinstance(node, ast.Name)}:
        found = {_table(value, own) for value in given_to(function, name)}
        if found and None not in found and found.isdisjoint(part.tables) and name not in function.parameters:
            yield name


def _table(value: ast.expr, own: str) -> str | None:
    match value:
        case ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table, attr="pop" | "get")):
            return own_attribute(table, own)
    return None

"""What the constructor put into a field that another method overwrites: that is what is lost first."""

from dataclasses import replace

from auditor.flow.lease import Field, StoredField
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.entered import ENTERS
from auditor.project.code.modules import Function
from auditor.project.meaning.not_owning import asked_at_birth
from auditor.project.outcome import Outcome


def overwritten_as_well(
    outcomes: list[Outcome], found: dict[int, tuple[StoredField, ...]]
) -> dict[int, tuple[StoredField, ...]]:
    """For each such outcome (by id of its call) its fields, unless what is there may have changed places with
    another by then."""
    overwrites = {
        each.field: each.overwrite
        for fields in found.values()
        for each in fields
        if each.overwrite is not None
    }
    making = {"__init__", "__post_init__", *ENTERS}
    begun = (each for each in outcomes if each.function.name in making and id(each.call) in found)
    return {
        id(outcome.call): tuple(
            replace(each, overwrite=overwrites.get(each.field) or overwrites.get(_container(each.field)))
            if (each.released_by or each.escapes)
            and not _changes_places(outcome.function, each.field.path)
            and not any(asked_at_birth(outcome.function, f".{each.field.path}"))  # ended by that flag
            else each
            for each in found[id(outcome.call)]
        )
        for outcome in begun
    }


def _container(field: Field) -> Field:
    """`states` of `states[*]`, a record of which another method puts one over."""
    return replace(field, path=field.path.removesuffix("[*]"))


def _changes_places(maker: Function, field: str) -> bool:
    """`self.front, self.back = self.back, self.front` in a method of the maker's class."""
    return any(
        own_attribute(value, method.owner or "") == field
        and own_attribute(to, method.owner or "") is not None
        for method in (maker.cls.methods.values() if maker.cls is not None else ())
        for to, value in assignments(method)
    )

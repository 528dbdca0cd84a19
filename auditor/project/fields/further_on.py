"""What is lost of containers into which a lease comes on a detour: from another container of the same object,
or in records that note nothing but its key."""

import ast
from collections.abc import Iterator

from auditor.flow.lease import Field, StoredField
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.field_paths import mentions, shortened
from auditor.project.code.modules import Class, Function
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.in_others import only_filled
from auditor.project.fields.noted_keys import places_of_key
from auditor.project.fields.record_places import takes_from
from auditor.project.fields.taken_out import TakenOut
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome


class FurtherOn(TakenOut):
    """Asks of these, too, which entries are lost."""

    def _lost_with_its_key(self, outcome: Outcome) -> Iterator[StoredField]:
        """`self.replay.append(Turn(text, version))` of a version that is pinned: what the list loses."""
        cls = outcome.function.cls
        for path in sorted(places_of_key(outcome, self.model)) if cls is not None else ():
            if len(path) == 4 and cls is not None:
                field = path[-1][1:]
                enders = [each for each in self._family(cls) if self._gives_back(outcome, each, field)]
                yield from self._lost_there(outcome, cls, path, enders)

    def _lost_further_on(self, outcome: Outcome, path: Path) -> Iterator[StoredField]:
        """`self.ready.append((key, self.waiting.pop(key)))`: what `ready` loses of what `path` held."""
        cls, acquisition = outcome.function.cls, outcome.acquisition
        if cls is None or path[2:3] != (ANY_ITEM,) or acquisition.foreign or acquisition.keyed:
            return
        for whole in sorted(self._moved_to(outcome, cls, path)):
            enders = [each for each in self._family(cls) if self._ends_there(outcome, each, whole)]
            yield from self._lost_there(outcome, cls, whole, enders)
            if not enders and self._is_only_filled_there(cls, whole[1][1:]):
                yield StoredField(Field(cls.qualname, "".join(shortened(whole)[1:])[1:]), outcome.lease.span)

    def _is_only_filled_there(self, cls: Class, field: str) -> bool:
        """Nobody comes for it any more."""
        others = (each for each in self._family(cls) if each.name not in INITIAL)
        return only_filled(self.project, field) and not any(_takes_out(each, field) for each in others)

    def _lost_there(
        self, outcome: Outcome, cls: Class, whole: Path, enders: list[Function]
    ) -> Iterator[StoredField]:
        short, family = shortened(whole), self._family(cls)
        self.whole[short] = whole
        self.noted = frozenset({short})
        drops = [
            drop
            for method in family
            if enders and method not in enders and mentions(method, whole[1][1:])
            if not self._hands_out(outcome, method, whole)
            for drop in self._lost_entries(outcome, family, method, short)
        ]
        drops += [
            drop
            for method in enders
            for drop in self._rest_dropped(outcome, family, method, short)
            if whole[2:] == (ANY_ITEM,)
        ]
        if drops:
            field = Field(cls.qualname, "".join(short[1:])[1:])
            names = tuple(method.qualname for method in enders)
            yield StoredField(field, outcome.lease.span, names, drops=tuple(drops))

    def _family(self, cls: Class) -> list[Function]:
        return [method for method in self.family_of(cls) if method.owner is not None]

    def _moved_to(self, outcome: Outcome, cls: Class, path: Path) -> set[Path]:
        """Other containers of the object into which a method puts what it takes out of this one."""
        found: set[Path] = set()
        for method in self._family(cls):
            if method is not outcome.function and _takes_out(method, path[1][1:]):
                own, whole = method.owner or "", self.whole.get(path, path)
                followed = self._followed(method, (own, *whole[1:]), outcome.acquisition)
                paths = followed.endings.stored.values() if followed is not None else ()
                found |= {(path[0], *to[1:]) for to in paths if to[0] == own and to[2:3] == (ANY_ITEM,)}
        return {to for to in found if to[1] != path[1]}

    def _hands_out(self, outcome: Outcome, method: Function, whole: Path) -> bool:
        """Its callers are shown what it takes out, `return late`, and see to that."""
        followed = self._followed(method, (method.owner or "", *whole[1:]), outcome.acquisition)
        return followed is not None and followed.endings.comes_back

    def _ends_there(self, outcome: Outcome, method: Function, whole: Path) -> bool:
        followed = self._followed(method, (method.owner or "", *whole[1:]), outcome.acquisition)
        return followed is not None and bool(followed.endings.released)


def _takes_out(method: Function, field: str) -> bool:
    """It pops something out of the container, or puts another one in its place; else it only notes what is
    there elsewhere, `self.due.append(self.filling[key])`."""
    own = method.owner or ""
    replaced = (own_attribute(target, own) == field for target, _ in assignments(method))
    emptied = (
        own_attribute(call.func.value, own) == field
        for call in method.calls
        if last_name(call) == "clear" and isinstance(call.func, ast.Attribute)
    )
    return takes_from(method, {field}) or any(replaced) or any(emptied)

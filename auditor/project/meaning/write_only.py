"""Lists into which things are put and out of which nobody ever takes one: `self.sent.append(n)` of a link.
Who puts a lease there has handed it over to nobody."""

import re
from collections.abc import Iterable

from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function

PUT = r"\.(?:append|appendleft|add|extend|insert)\("
MADE = r"\s*(?::[^=\n]+)?=\s*(?:\[\]|set\(\)|list\(\)|(?:\w+\.)?deque\([^)\n]*\))\s*(?:#.*)?$"


class WriteOnly:
    """Each name of a field is looked for once."""

    def __init__(self, model: ClassModel) -> None:
        self.model = model
        self._known: dict[str, bool] = {}

    def keeps(self, function: Function, places: Iterable[Path]) -> bool:
        """Whether these places are all in such lists of the method's own object."""
        return all(
            place[0] == function.owner
            and place[2:3] == (ANY_ITEM,)
            and self._is_never_read(function, place[1])
            for place in places
        )

    def _is_never_read(self, function: Function, field: str) -> bool:
        """`field` is a piece of a path, `.sent`. A base that nobody has read may read it."""
        if function.cls is None or not self._bases_are_known(function.cls):
            return False
        if field not in self._known:
            own = function.module.text
            self._known[field] = _only_put(own, field) and all(
                _only_put(text, field) for _, text in self.model.project.mentioning(field[1:])
            )
        return self._known[field]

    def _bases_are_known(self, cls: Class) -> bool:
        return all(len(self.model.bases(each)) == len(each.node.bases) for each in self.model.lineage(cls))


def _only_put(text: str, field: str) -> bool:
    """Every mention puts something in, makes the list, or asks for its length."""
    named = re.escape(field)
    mentions = len(re.findall(rf"{named}\b|[\"']{named[2:]}[\"']|^\s*{named[2:]}\s*:", text, re.MULTILINE))
    filled = len(re.findall(rf"{named}{PUT}|len\([\w.]+{named}\)|\b\w+{named}{MADE}", text, re.MULTILINE))
    return mentions == filled

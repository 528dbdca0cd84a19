"""Pairs of which one half is a class's own and the other its base's:

    class Bins:                                      class WaitingBins(Bins):
        def draw(self):                                  def lay_back(self, bin):
            return self._bins.pop()                          self._bins.append(bin)

Neither class shows a pool by itself, and nobody says that the two methods belong together but who uses them.
"""

import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.halves import Half, Pair

WRITTEN = re.compile(
    r"\.(\w+)(?:\[[^\]\n]*\])?(?:\.(?:pop|popleft|popitem|append|appendleft|add|insert|remove|discard|put|put_nowait"
    r"|get_nowait|setdefault|acquire|release)\(| [-+|&]?= )|heap(?:pop|push)\(\w+\.(\w+)"
)
"""Fields that a text fills, empties, counts or sets."""

MOST_CLASSES, MOST_METHODS = 7, 60
"""So many at most: what is deeper or broader is a framework and not a pool, and takes most of the time."""

Discover = Callable[[ClassModel, Class], Iterator[Pair]]


def across_bases(model: ClassModel, cls: Class, known: Set[Function], discover: Discover) -> Iterator[Pair]:
    """Of one class and its bases; of methods that are `known` to acquire all is said already."""
    lineage = model.lineage(cls) if cls.node.bases else ()
    small = len(lineage) <= MOST_CLASSES and sum(len(each.methods) for each in lineage) <= MOST_METHODS
    if len(lineage) < 2 or not small or not _share_a_field(list(map(_written, lineage))):
        return
    merged = Class(cls.module, cls.qualname, cls.node)
    themselves: dict[Function, Function] = {}
    for each in reversed(lineage):
        for name, method in each.methods.items():
            merged.methods[name] = replace(method, cls=merged, field_work=None)
            themselves[merged.methods[name]] = method
    merged._text = "\n".join(method.text for method in merged.methods.values())
    for pair in discover(model, merged):
        acquires, releases = (
            tuple(_as(half, themselves) for half in side) for side in (pair.acquires, pair.releases)
        )
        apart = {half.function.cls for half in acquires}.isdisjoint({half.function.cls for half in releases})
        if apart and not any(half.function in known for half in acquires):
            yield replace(pair, owner=cls, acquires=acquires, releases=releases, proposed=True)


def _share_a_field(written: Sequence[Set[str]]) -> bool:
    """Two of the classes work on a field of one name."""
    return sum(map(len, written)) > len(frozenset[str]().union(*written))


def _written(cls: Class) -> Set[str]:
    """By its methods, once it is made."""
    return {
        one or other
        for name, method in cls.methods.items()
        if name != "__init__"
        for one, other in WRITTEN.findall(method.text)
    }


def _as(half: Half, themselves: dict[Function, Function]) -> Half:
    return replace(half, function=themselves.get(half.function, half.function))

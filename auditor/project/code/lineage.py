"""Classes across files: their bases, their subclasses, and which method a name means."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.annotations import named
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project


class Lineage:
    def __init__(self, project: Project) -> None:
        self.project = project
        self._bases: dict[Class, list[Class]] = {}
        self._unfinished = 0  # how many classes' bases are being looked for: no lineage is whole meanwhile
        self._lineages: dict[Class, list[Class]] = {}
        self._method_names: dict[Class, frozenset[str]] = {}
        self._derived: dict[Class, list[Class]] = {}
        self._counted = -1

    def bases(self, cls: Class) -> list[Class]:
        if cls not in self._bases:
            self._bases[cls] = []
            self._unfinished += 1
            self._bases[cls] = list(self._named_bases(cls))
            self._unfinished -= 1
        return self._bases[cls]

    def _named_bases(self, cls: Class) -> Iterator[Class]:
        for node in cls.node.bases:
            base = named(self.project, cls.module, node.value if isinstance(node, ast.Subscript) else node)
            if isinstance(base, Class) and base is not cls:
                yield base

    def lineage(self, cls: Class) -> Sequence[Class]:
        """The class and its bases, nearest first (depth first, as for code without diamonds)."""
        if cls in self._lineages:
            return self._lineages[cls]
        order = self._in_order(cls)
        if not self._unfinished:
            self._lineages[cls] = order
        return order

    def _in_order(self, cls: Class) -> list[Class]:
        order: list[Class] = []
        stack = [cls]
        while stack:
            here = stack.pop()
            if here not in order:
                order.append(here)
                stack.extend(reversed(self.bases(here)))
        return order

    def method_names(self, cls: Class) -> frozenset[str]:
        """Of its own methods and those that it inherits."""
        if cls in self._method_names:
            return self._method_names[cls]
        names = frozenset(name for each in self.lineage(cls) for name in each.methods)
        if not self._unfinished:
            self._method_names[cls] = names
        return names

    def subclasses(self, cls: Class) -> Iterator[Class]:
        """Among what was parsed so far."""
        modules = self.project.parsed()
        if len(modules) != self._counted:
            self._counted = len(modules)
            self._derived = {}
            for module in modules:
                for other in module.classes.values():
                    for base in self.lineage(other)[1:]:
                        self._derived.setdefault(base, []).append(other)
        yield from self._derived.get(cls, ())

    def method(self, cls: Class, name: str) -> Function | None:
        for each in self.lineage(cls):
            if name in each.methods:
                return each.methods[name]
        return None

    def super_method(self, cls: Class, name: str) -> Function | None:
        for each in self.lineage(cls)[1:]:
            if name in each.methods:
                return each.methods[name]
        return None

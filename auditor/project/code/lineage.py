"""Classes across files: their bases, their subclasses, and which method a name means."""

import ast
from collections.abc import Iterator

from auditor.project.code.annotations import named
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project


class Lineage:
    def __init__(self, project: Project) -> None:
        self.project = project
        self._bases: dict[Class, list[Class]] = {}
        self._derived: dict[Class, list[Class]] = {}
        self._counted = -1

    def bases(self, cls: Class) -> list[Class]:
        if cls not in self._bases:
            self._bases[cls] = []
            found = []
            for node in cls.node.bases:
                base = named(
                    self.project, cls.module, node.value if isinstance(node, ast.Subscript) else node
                )
                if isinstance(base, Class) and base is not cls:
                    found.append(base)
            self._bases[cls] = found
        return self._bases[cls]

    def lineage(self, cls: Class) -> list[Class]:
        """The class and its bases, nearest first (depth first, as for code without diamonds)."""
        order: list[Class] = []
        stack = [cls]
        while stack:
            here = stack.pop()
            if here not in order:
                order.append(here)
                stack.extend(reversed(self.bases(here)))
        return order

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

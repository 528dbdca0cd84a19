"""Functions that reach a field through an object of unknown type: the attribute's name decides there, and any
release of something so named counts."""

import ast
import re
from collections.abc import Iterator, Set

from auditor.ir.ops import Path
from auditor.project.code.modules import Class, Function, Module
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk


class Elsewhere:
    """Looks through the whole project, once, for releases of these attributes."""

    def __init__(self, project: Project, attributes: frozenset[str]) -> None:
        self.project = project
        self._attributes = attributes
        self._by_attribute: dict[str, list[tuple[str, set[str]]]] | None = None
        self._taken_out: dict[tuple[str, str], bool] = {}
        self._owners: dict[str, set[tuple[str, str]]] = {}

    def releasing(self, cls: Class, attribute: str) -> Iterator[str]:
        """Functions that reach the field through an object of unknown type.

        Where several classes have a field of that name, the object must be called like the class.
        """
        if self._by_attribute is None:
            self._by_attribute = self._index()
        owners = self._owners.get(attribute, set())
        words = set(split(cls.name))
        for function, bases in self._by_attribute.get(attribute, ()):
            if len(owners) <= 1 or any(words & set(split(base)) for base in bases):
                yield function

    def of_one_class(self, attribute: str) -> bool:
        """Whether no other class has a field of that name, as far as `releasing` was asked."""
        return len(self._owners.get(attribute, ())) <= 1

    def taken_out(self, path: Path) -> bool:
        """Whether a function takes things out of a list so named of an object that is not its own; or of its
        own, where it is another's list, `self.writer.queue`."""
        at = next((number for number, piece in enumerate(path) if piece.startswith("[")), 0)
        if at < 2:
            return False
        attribute, others = path[at - 1][1:], r"(?<!\bself)" if at == 2 else ""
        if (attribute, others) not in self._taken_out:
            taking = re.compile(rf"{others}\.{attribute}\.(?:pop|popleft|popitem|get|get_nowait)\(")
            self._taken_out[attribute, others] = any(
                attribute in each.text and taking.search(each.text) for each in self.project.parsed()
            )
        return self._taken_out[attribute, others]

    def of_its_own(self, path: Path) -> Iterator[str]:
        """Methods, of whatever class, that release a field so named, of a field, of their own object."""
        attribute = path[-1][1:]
        if len(path) < 3 or any(piece.startswith("[") for piece in path[1:]):
            return
        for module in self.project.parsed():
            if "." + attribute not in module.text:
                continue
            for function in module.by_node.values():
                asked = function.is_method and "." + attribute in function.text
                if asked and attribute in released_attributes(function, of_others=False):
                    yield function.qualname

    def _index(self) -> dict[str, list[tuple[str, set[str]]]]:
        found: dict[str, list[tuple[str, set[str]]]] = {}
        for module in self.project.parsed():
            for attribute in self._attributes:
                if "." + attribute in module.text:
                    self._owners.setdefault(attribute, set()).update(_owning_classes(module, attribute))
            if not any("." + attribute in module.text for attribute in self._attributes):
                continue
            for function in module.by_node.values():
                text = function.text
                if not any("." + attribute in text for attribute in self._attributes):
                    continue
                released = released_attributes(function)
                for attribute in sorted(self._attributes & set(released)):
                    found.setdefault(attribute, []).append((function.qualname, released[attribute]))
        return {attribute: sorted(rows, key=lambda row: row[0]) for attribute, rows in found.items()}


def _owning_classes(module: Module, attribute: str) -> Iterator[tuple[str, str]]:
    for cls in module.classes.values():
        if attribute in cls.methods:
            yield module.path, cls.qualname  # a property
        for method in cls.methods.values():
            own = method.owner
            for node in method.nodes:
                match node:
                    case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Store()) if (
                        attr == attribute and name == own
                    ):
                        yield module.path, cls.qualname


Carried = dict[str, set[tuple[str, str]]]
"""Local names, and the (attribute, last word of the object it was read from) that their values came from."""


def released_attributes(
    function: Function, of_others: bool = True, known: Set[ast.Call] = frozenset()
) -> dict[str, set[str]]:
    """Attributes whose values reach a releasing call in this function, flow-insensitively, and of what
    object; of the method's own only if it is not `of_others`. `known` are calls that are known to release."""
    own = function.owner if of_others else None
    releasing = [call for call in function.calls if call in known or looks_releasing(call)]
    found: dict[str, set[str]] = {}
    if not releasing:
        return found
    carried = _carried(function, own)
    for call in releasing:
        operands: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
        if isinstance(call.func, ast.Attribute):
            operands.append(call.func.value)
        for operand in operands:
            for attribute, base in _sources(operand, carried, own):
                found.setdefault(attribute, set()).add(base)
    return found


def _carried(function: Function, own: str | None) -> Carried:
    carried: Carried = {}
    for _ in range(2):
        for target, value in _bindings(function):
            sources = _sources(value, carried, own)
            for name in walk(target):
                if isinstance(name, ast.Name):
                    carried.setdefault(name.id, set()).update(sources)
    return carried


def _bindings(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in function.statements:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield target, value
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                yield target, value
            case ast.AugAssign(target=target, value=value):
                yield target, value
    for inner in function.nodes:
        if isinstance(inner, ast.comprehension):
            yield inner.target, inner.iter


def _sources(node: ast.AST, carried: Carried, own: str | None) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for inner in walk(node):
        if isinstance(inner, ast.Attribute):
            if not (isinstance(inner.value, ast.Name) and inner.value.id == own):
                found.add((inner.attr, _last_word(inner.value)))
        elif isinstance(inner, ast.Name):
            found |= carried.get(inner.id, set())
    return found


def _last_word(node: ast.expr) -> str:
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")

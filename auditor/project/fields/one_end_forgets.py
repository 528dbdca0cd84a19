"""Two ends of the same objects, of which one gives back all that the other does but for one field:
`finish(request)` detaches the grammar, and `abort(request)` does not."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence, Set

from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.elsewhere import released_attributes
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split

OVER = frozenset({"abort", "cancel", "kill", "terminate", "finish", "close", "end", "complete"})
"""First words of methods after which the object that they are given is over."""

ASKING = re.compile(r"remove|discard|len|isinstance|print|index")

Known = Callable[[Function], Set[ast.Call]]
"""Calls of a function that give back, by what is known of the lease's pool."""


class Ends:
    """Methods of one class that are given such objects."""

    def __init__(self, project: Project, family: Sequence[Function], field: str, known: Known) -> None:
        self.project = project
        self.family = family
        self.field = field
        self.known = known

    def forgetful(self, enders: Sequence[Function]) -> Function | None:
        """The one that forgets the field, which one of the `enders` gives back."""
        for ender in enders:
            whole = self._given_back(ender) if ender in self.family and is_over(ender) else set()
            for other in self.family if whole else ():
                if _are_told_another_kind(ender, other):
                    continue
                rest = self._given_back(other) if other is not ender and is_over(other) else set()
                if rest and whole - rest == {self.field} and not self._comes_to_it(other):
                    return other
        return None

    def _given_back(self, method: Function) -> set[str]:
        """Fields that it gives back, or a helper to which it hands the object."""
        helpers = (each for call in method.calls for each in self._helpers(method, call))
        return {
            field
            for each in (method, *helpers)
            for field in released_attributes(each, known=self.known(each))
            if any(_is_field_of_told(node, field, each) for node in each.nodes)
        }

    def _helpers(self, method: Function, call: ast.Call) -> Iterator[Function]:
        match call.func:
            case ast.Attribute(value=ast.Name(id=own), attr=name) if own == method.owner:
                yield from (each for each in self.family if each.name == name and each is not method)

    def _comes_to_it(self, method: Function) -> bool:
        """It, a helper of it, or a caller speaks of the field; or somebody else is given the object, or it
        is put somewhere."""
        helpers = [each for call in method.calls for each in self._helpers(method, call)]
        inside = {id(call) for call in method.calls if any(True for _ in self._helpers(method, call))}
        told = [call for call in method.calls if id(call) not in inside and _is_told(call, method)]
        return (
            any(self._speaks(each) for each in (method, *helpers, *callers(self.project, method)))
            or any(ASKING.fullmatch(last_name(call)) is None for call in told)
            or any(_is_told(call, each) for each in helpers for call in each.calls)
        )

    def _speaks(self, function: Function) -> bool:
        return any(getattr(node, "attr", getattr(node, "value", "")) == self.field for node in function.nodes)


def callers(project: Project, method: Function) -> Iterator[Function]:
    """Functions that call whatever has its name."""
    for module in project.parsed():
        if f"{method.name}(" in module.text:
            for function in module.by_node.values():
                if any(last_name(call) == method.name for call in function.calls):
                    yield function


def _is_field_of_told(node: ast.AST, field: str, method: Function) -> bool:
    told = method.parameters[1:]
    return getattr(node, "attr", "") == field and getattr(getattr(node, "value", None), "id", "") in told


def _is_told(call: ast.Call, method: Function) -> bool:
    """It is given the object itself."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    told = method.parameters[1:]
    return any(isinstance(node, ast.Name) and node.id in told for node in given)


def is_over(method: Function) -> bool:
    """`abort(request)`, `cancel_request(request)`, and not `cancel_prefill(request)`: that goes on."""
    words, told = split(method.name), method.parameters[1:2]
    if not told or method.owner is None or method.is_abstract:
        return False
    named = {word for name in (*told, _annotation(method, told[0])) for word in split(name)}
    return bool(words) and words[0] in OVER and set(words[1:]) <= named


def _are_told_another_kind(one: Function, other: Function) -> bool:
    """`finish(request: Request)` and `close_view(view: View)`, whose fields have some names in common."""
    kinds = {_annotation(each, each.parameters[1]) for each in (one, other) if each.parameters[1:]}
    return len(kinds - {""}) > 1


def _annotation(method: Function, name: str) -> str:
    args = method.node.args.args if not isinstance(method.node, ast.Module) else []
    found = (each.annotation for each in args if each.arg == name)
    return next((each.id for each in found if isinstance(each, ast.Name)), "")

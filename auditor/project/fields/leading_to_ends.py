"""Which calls may end a lease, by names: those of its pool's methods, and of every function that calls one of
them or hands it on. `self.quota.refund(job.tokens)` ends no lease of a pool that nobody reaches from there.

Nothing is followed: a name stands for all that are called so."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name

WITH_AN_END = frozenset({"finalize", "callback", "map", "submit", "partial", "register"})
"""Functions that are told one, to call it later."""

_GIVEN = (re.compile(r"=(\w++)"), re.compile(r"= (\w++)"), re.compile(r":(\w++)"))
"""Of a text that is read from its end: what begins with a literal is found several times as fast."""


class LeadingToEnds:
    """Answers for the leases of one protocol after another."""

    def __init__(self, project: Project, recogniser: Recogniser) -> None:
        self.project = project
        self.recogniser = recogniser
        self._named: dict[str, list[Function]] | None = None
        self._giving: dict[str, list[Function]] | None = None
        self._kept: dict[Function, dict[str, list[str]]] = {}
        self._mentioned: dict[str, frozenset[str]] = {}
        self._known: dict[tuple[str, str], bool] = {}

    def may_end(self, protocol: str, call: ast.Call) -> bool:
        """Whether the call may reach an end of such a lease."""
        name = last_name(call)
        if name in WITH_AN_END:
            return True
        if (protocol, name) not in self._known:
            self._known[protocol, name] = self._reaches(name, self._ends(protocol))
        return self._known[protocol, name]

    def _ends(self, protocol: str) -> frozenset[str]:
        """Whatever the pool does by itself that is no lending may give back, too."""
        lender, lent = protocol.partition(".")[0], self.recogniser.taking_names(protocol)
        pools = (cls for cls in self.recogniser.pools if cls.name == lender)
        own = frozenset(name for cls in pools for name in cls.methods) - lent
        return own | self.recogniser.ending_names_of_class(protocol)

    def _reaches(self, name: str, ends: frozenset[str]) -> bool:
        """Nearest first: what ends something is seldom far from one of its ends."""
        reached, new = {name}, {name}
        while new and new.isdisjoint(ends):
            new = set().union(*map(self._names, new)) - reached
            reached |= new
        return bool(new)

    def _names(self, name: str) -> frozenset[str]:
        """What functions of this name call or hand on, and what is kept under it."""
        if name not in self._mentioned:
            said = (_mentioned(function) for function in self._functions().get(name, ()))
            self._mentioned[name] = frozenset(self._kept_under(name)).union(*said)
        return self._mentioned[name]

    def _functions(self) -> dict[str, list[Function]]:
        if self._named is None:
            self._named = {}
            for module in self.project.parsed():
                for function in module.by_node.values():
                    self._named.setdefault(function.name, []).append(function)
        return self._named

    def _kept_under(self, name: str) -> Iterator[str]:
        """Only those are read that give the name something: few do."""
        if self._giving is None:
            self._giving = {}
            for module in self.project.parsed():
                for function in module.by_node.values():
                    for given in _given_in(function):
                        self._giving.setdefault(given, []).append(function)
        for function in self._giving.get(name, ()):
            if function not in self._kept:
                self._kept[function] = _kept_as(function)
            yield from self._kept[function].get(name, ())


def _given_in(function: Function) -> frozenset[str]:
    backwards = function.own_text[::-1]
    return frozenset(name[::-1] for pattern in _GIVEN for name in pattern.findall(backwards))


def _mentioned(function: Function) -> frozenset[str]:
    return frozenset(
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in function.nodes
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
    )


def _kept_as(function: Function) -> dict[str, list[str]]:
    """`step.on_drop = self.rows.evict`, `Step(row, on_drop=self.rows.evict)`: whoever calls that ends one."""
    told = ((each.arg or "", each.value) for call in function.calls for each in call.keywords)
    put = (
        (target.attr, value) for target, value in assignments(function) if isinstance(target, ast.Attribute)
    )
    kept: dict[str, list[str]] = {}
    for name, value in (*told, *put):
        if isinstance(value, ast.Attribute):
            kept.setdefault(name, []).append(value.attr)
    return kept

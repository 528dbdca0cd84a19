"""Which calls may end a lease, by names: those of its pool's methods, and of every function that calls one of
them or hands it on. `self.quota.refund(job.tokens)` ends no lease of a pool that nobody reaches from there.

Nothing is followed: a name stands for all that are called so."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name

WITH_AN_END = frozenset({"finalize", "callback", "map", "submit", "partial", "register"})
"""Functions that are told one, to call it later."""


class LeadingToEnds:
    """Answers for the leases of one protocol after another."""

    def __init__(self, project: Project, recogniser: Recogniser) -> None:
        self.project = project
        self.recogniser = recogniser
        self._mentioned: dict[str, frozenset[str]] | None = None
        self._known: dict[str, frozenset[str]] = {}

    def may_end(self, protocol: str, call: ast.Call) -> bool:
        """Whether the call may reach an end of such a lease."""
        name = last_name(call)
        return name in WITH_AN_END or name in self._leading(protocol)

    def _leading(self, protocol: str) -> frozenset[str]:
        if protocol not in self._known:
            self._known[protocol] = self._reached_from(self._ends(protocol))
        return self._known[protocol]

    def _ends(self, protocol: str) -> frozenset[str]:
        """Whatever the pool does by itself that is no lending may give back, too."""
        lender, lent = protocol.partition(".")[0], self.recogniser.taking_names(protocol)
        pools = (cls for cls in self.recogniser.pools if cls.name == lender)
        own = frozenset(name for cls in pools for name in cls.methods) - lent
        return own | self.recogniser.ending_names_of_class(protocol)

    def _reached_from(self, ends: frozenset[str]) -> frozenset[str]:
        leading, new = ends, ends
        while new:
            new = frozenset(
                name
                for name, mentioned in self._names().items()
                if name not in leading and not mentioned.isdisjoint(new)
            )
            leading |= new
        return leading

    def _names(self) -> dict[str, frozenset[str]]:
        """What functions of each name call or hand on."""
        if self._mentioned is None:
            found: dict[str, frozenset[str]] = {}
            for module in self.project.parsed():
                for function in module.by_node.values():
                    found[function.name] = found.get(function.name, frozenset()) | _mentioned(function)
                    for name, given in _kept_as(function):
                        found[name] = found.get(name, frozenset()) | given
            self._mentioned = found
        return self._mentioned


def _mentioned(function: Function) -> frozenset[str]:
    return frozenset(
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in function.nodes
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
    )


def _kept_as(function: Function) -> Iterator[tuple[str, frozenset[str]]]:
    """`step.on_drop = self.rows.evict`, `Step(row, on_drop=self.rows.evict)`: whoever calls that ends one."""
    told = ((each.arg or "", each.value) for call in function.calls for each in call.keywords)
    put = (
        (target.attr, value) for target, value in assignments(function) if isinstance(target, ast.Attribute)
    )
    for name, value in (*told, *put):
        if isinstance(value, ast.Attribute):
            yield name, frozenset({value.attr})

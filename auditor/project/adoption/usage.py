"""Which protocols, names and calls were met: the figures of the summary."""

import ast
from collections import Counter
from collections.abc import Sequence
from functools import cache

from auditor.flow.trace import span_of
from auditor.model import ProtocolUse
from auditor.project.adoption.pool_call import PoolCall
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import ACQUIRE_WORDS, LEASE_METHODS, RELEASE_WORDS, RELEASING, take_apart


@cache
def looks_releasing(name: str) -> bool:
    return bool(RELEASING.fullmatch(name) or name in LEASE_METHODS or take_apart(name, RELEASE_WORDS))


class Usage:
    def __init__(self, project: Project, recogniser: Recogniser, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes
        self.acquires: Counter[tuple[str, str]] = Counter()
        self.releases: Counter[tuple[str, str]] = Counter()
        self._released_names: set[str] = set()
        self._calls = [
            _pool_call(outcome.function, outcome.call, releases=False)
            for outcome in outcomes
            if outcome.function.cls is not None
        ]
        origin = {}
        for outcome in outcomes:
            source = recogniser.source(outcome.function, outcome.call)
            if source is not None:
                self.acquires[(source.protocol, source.origin)] += 1
                origin[source.protocol] = source.origin
        self._count_releases(project, recogniser)

    def _count_releases(self, project: Project, recogniser: Recogniser) -> None:
        told = {half.name for half in recogniser.releasing}
        for module in project.parsed():
            lines = [line for line, name in module.called if name in told or looks_releasing(name)]
            for function in module.functions_at(lines):
                for call in function.calls:
                    name = last_name(call)
                    looks = name in told or looks_releasing(name)
                    found = recogniser.release_source(function, call) if looks else None
                    if found is not None:
                        self.releases[found] += 1
                        self._released_names.add(name)
                        if function.cls is not None:
                            self._calls.append(_pool_call(function, call, releases=True))

    def protocols(self) -> tuple[ProtocolUse, ...]:
        keys = sorted(set(self.acquires) | set(self.releases))
        return tuple(
            ProtocolUse(name, origin, self.acquires[name, origin], self.releases[name, origin])
            for name, origin in keys
        )

    def acquire_names(self) -> tuple[str, ...]:
        return tuple(sorted({last_name(outcome.call) for outcome in self.outcomes}))

    def release_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._released_names))

    def pool_calls(self) -> tuple[PoolCall, ...]:
        """The calls in methods, by place; one call may do both."""
        return tuple(sorted(self._calls, key=lambda call: (call.span, call.releases)))


def _pool_call(function: Function, call: ast.Call, *, releases: bool) -> PoolCall:
    assert function.cls is not None
    owner, name = function.cls.qualname, last_name(call)
    return PoolCall(
        span=span_of(function.module.path, call, function.module.lines),
        owner=owner,
        method=function.qualname.removeprefix(f"{owner}.").partition(".")[0],
        name=name,
        releases=releases,
        on_self=isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "self",
        speaks=looks_releasing(name) if releases else take_apart(name, ACQUIRE_WORDS) is not None,
    )

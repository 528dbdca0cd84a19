"""Marks that one function leaves held, where all others end in their own functions what they mark:

    def put(self, key, value):                       def scan(self, prefix):
        if not self.limiter.try_enter():                 if self.limiter.try_enter():
            return 429                                       return 200, self.backend.scan(prefix)
        self.backend.put(key, value)                     return 429, []
        self.limiter.exit()

What is pinned, locked or counted may be ended by whoever can reach it. Here nobody does: every call that ends
such a mark stands in a function that has made it (Engler et al., "Bugs as Deviant Behavior", SOSP 2001)."""

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from auditor.flow.lease import EXCEPTIONAL, Leak
from auditor.project.code.bindings import TEST_FILE
from auditor.project.code.modules import Function
from auditor.project.fields.forgetting import INITIAL
from auditor.project.leases.leases import BEGINNING
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome, loses_normally

Place = tuple[str, int]
"""A file and a line of it."""


class EndedNowhereElse:
    """Asks the texts of all files for other ends, once for each protocol of which something is left held."""

    def __init__(
        self, recogniser: Recogniser, sources: Mapping[str, str], outcomes: Collection[Outcome]
    ) -> None:
        self.recogniser = recogniser
        self.sources = sources
        self._of: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if self._asks_itself(outcome):
                self._of.setdefault(outcome.acquisition.protocol, []).append(outcome)
        self._judged: dict[str, bool] = {}

    def told(self, outcome: Outcome) -> Outcome:
        """With the ways on which it is left held, where nobody else ends it."""
        left = tuple(leak for leak in outcome.left if leak.loss not in EXCEPTIONAL)
        protocol = outcome.acquisition.protocol
        if not left or not self._may_be_told(outcome) or outcome not in self._of.get(protocol, ()):
            return outcome
        if protocol not in self._judged:
            self._judged[protocol] = self._all_end_it_themselves(protocol)
        return self._lost(outcome, left) if self._judged[protocol] else outcome

    def _lost(self, outcome: Outcome, left: tuple[Leak, ...]) -> Outcome:
        return replace(outcome, lease=replace(outcome.lease, leaks=left, handed_over=False))

    def _asks_itself(self, outcome: Outcome) -> bool:
        """A user of the pool, who asks the half itself and no wrapper of it."""
        function = outcome.function
        if not outcome.acquisition.keyed or TEST_FILE.search(function.module.path):
            return False
        halves = self.recogniser.acquiring
        targets = self.recogniser.calls.targets(function, outcome.call)[0]
        return bool(targets) and all(
            target in halves and (function.cls is None or target.cls is not function.cls)
            for target in targets
        )

    def _may_be_told(self, outcome: Outcome) -> bool:
        name, lease = outcome.function.name, outcome.lease
        begins = BEGINNING.match(name) is not None or name in INITIAL
        return not (begins or lease.leaks or lease.released or lease.in_context_manager or outcome.stored)

    def _all_end_it_themselves(self, protocol: str) -> bool:
        users = self._of[protocol]
        ending = {user.function for user in users if user.lease.released and not loses_normally(user.lease)}
        leaving = {user.function for user in users if user.left and self._may_be_told(user)}
        names = self.recogniser.ending_names(protocol)
        if not names or len(ending) < len(leaving):
            return False
        ended_here = {
            (span.path, line)
            for user in users
            for span in user.lease.releases
            for line in range(span.line, span.end_line + 1)
        }
        either = "|".join(sorted(names))
        mentioned = re.compile(rf"(?<!def )\b(?:{either})\(|[.\"'](?:{either})\b")
        return all(
            place in ended_here or self._ends_others(place, protocol, names)
            for path, text in self.sources.items()
            for place in _places(mentioned, path, text)
        )

    def _ends_others(self, place: Place, protocol: str, names: Collection[str]) -> bool:
        """A method of another class, which only has the same name; or the call of a test."""
        path, line = place
        if TEST_FILE.search(path):
            return True
        module = self.recogniser.calls.model.project.module(path)
        if module is None:
            return False
        calls = [
            (function, call)
            for function in module.functions_at([line])
            for call in function.calls
            if call.lineno <= line <= (call.end_lineno or line) and last_name(call) in names
        ]
        return bool(calls) and all(self._is_of_another(function, call, protocol) for function, call in calls)

    def _is_of_another(self, function: Function, call: ast.Call, protocol: str) -> bool:
        targets = self.recogniser.calls.targets(function, call)[0]
        ends = (self.recogniser.releasing.get(target) for target in targets)
        return bool(targets) and all(end is None or end[0].name != protocol for end in ends)


def _places(pattern: re.Pattern[str], path: str, text: str) -> list[Place]:
    return [(path, text.count("\n", 0, found.start()) + 1) for found in pattern.finditer(text)]

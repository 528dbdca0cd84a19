"""Marks whose end nobody calls: a class can unpin what it pins, and nothing in the project asks it to."""

import re
from collections.abc import Mapping

from auditor.project.code.bindings import TEST_FILE
from auditor.project.fields.forgetting import INITIAL
from auditor.project.leases.leases import BEGINNING
from auditor.project.meaning.recognise import Recogniser
from auditor.project.outcome import Outcome
from auditor.project.pools.halves import Pair

ENDED_ALONE = "pin"
"""Locks may be meant to last until the process ends."""


class NeverEnded:
    """Asks the texts of all files, for each pair once."""

    def __init__(self, recogniser: Recogniser, sources: Mapping[str, str]) -> None:
        self.recogniser = recogniser
        self.sources = sources
        self._unasked: dict[str, str] = {}

    def of(self, outcome: Outcome) -> str:
        """The method that would end what the call marks, where nobody calls it; empty otherwise."""
        function = outcome.function
        if not outcome.acquisition.keyed or outcome.acquisition.inner or outcome.lease.released:
            return ""
        if BEGINNING.match(function.name) or function.name in INITIAL:
            return ""  # for as long as the object lives, or for whoever calls its counterpart
        if TEST_FILE.search(function.module.path) or outcome.lease.in_context_manager:
            return ""
        for target in self.recogniser.calls.targets(function, outcome.call)[0]:
            pair, half = self.recogniser.acquiring.get(target, (None, None))
            if pair is not None and half is not None and half.name.kind == ENDED_ALONE:
                return self._unasked_end(pair) if target.cls is not function.cls else ""
        return ""

    def _unasked_end(self, pair: Pair) -> str:
        if pair.name not in self._unasked:
            names = sorted({half.function.name for half in pair.releases})
            asked = any(self._is_asked(name) for name in names)
            self._unasked[pair.name] = "" if asked else names[0]
        return self._unasked[pair.name]

    def _is_asked(self, name: str) -> bool:
        """Called, taken from an object, or named in a text by which it may be looked up."""
        mentioned = re.compile(rf"(?<!def )\b{name}\(|[.\"']{name}\b")
        return any(name in text and mentioned.search(text) for text in self.sources.values())

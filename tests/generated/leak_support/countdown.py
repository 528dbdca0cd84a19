# poolaudit leaktests, sha256 5ded9620fe3e0cb4: written again as long as that is the digest of the rest
"""Lets so many calls pass and fails at the next."""

from __future__ import annotations

from .errors import InjectedFault


class Countdown:
    """Counts the calls of `tick`; armed, it fails in one of them."""

    def __init__(self, fault: type[Exception] = InjectedFault) -> None:
        self._fault = fault
        self.passed = 0
        self.fails_at: int | None = None
        self.failed_in = ""
        self.heard: list[object] | None = None
        """While it is a list, all calls are put into it."""

    def arm(self, place: int | None, passed: int = 0) -> None:
        """Fail at the call with this number; without one only count."""
        self.passed, self.fails_at, self.failed_in = passed, place, ""

    def tick(self, what: object) -> None:
        """One call."""
        self.passed += 1
        if self.passed == self.fails_at:
            self.failed_in = str(what)
            raise self._fault(f"injected at call {self.passed}, in the place of {what}")
        if self.heard is not None:
            self.heard.append(what)

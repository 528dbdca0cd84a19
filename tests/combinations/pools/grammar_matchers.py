# take: P.rent(key)
# give: P.turn_in(X)
# gets: value
# type: MatcherRental
import threading
from collections import defaultdict


class Matcher:
    def __init__(self, grammar):
        self.grammar = grammar
        self.accepted = []

    def reset(self):
        self.accepted.clear()


class MatcherRental:
    """Compiled grammar matchers by schema; keeps at most four resting per schema."""

    REST_LIMIT = 4

    def __init__(self):
        self._resting = defaultdict(set)
        self._lock = threading.Lock()
        self.compiled = self.rented = 0

    def rent(self, grammar):
        with self._lock:
            self.rented += 1
            if self._resting[grammar]:
                return self._resting[grammar].pop()
            self.compiled += 1
        return Matcher(grammar)

    def turn_in(self, matcher):
        matcher.reset()
        with self._lock:
            resting = self._resting[matcher.grammar]
            if len(resting) < self.REST_LIMIT:
                resting.add(matcher)

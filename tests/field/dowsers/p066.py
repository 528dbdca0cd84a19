"""Prefetch requests for expert weights: issue, then await it or cancel it."""
import itertools
from concurrent.futures import ThreadPoolExecutor


class Prefetcher:
    def __init__(self, load, depth=4):
        self._load = load
        self._depth = depth
        self._ex = ThreadPoolExecutor(depth)
        self._jobs = {}
        self._gen = itertools.count(1)

    def issue(self, expert):
        if len(self._jobs) >= self._depth:
            return None
        token = next(self._gen)
        self._jobs[token] = self._ex.submit(self._load, expert)
        return token

    def collect(self, token):
        return self._jobs.pop(token).result()

    def cancel(self, token):
        job = self._jobs.pop(token, None)
        if job is not None:
            job.cancel()


class ExpertRunner:
    def __init__(self, prefetcher: Prefetcher, router):
        self.prefetcher = prefetcher
        self.router = router
        self.ahead = {}

    def look_ahead(self, layer, hidden):
        expert = self.router.guess(layer + 1, hidden)
        token = self.prefetcher.issue(expert)  # clean: kept in ahead, enter_layer() collects or cancels
        if token is not None:
            self.ahead[layer + 1] = (expert, token)

    def enter_layer(self, layer, expert):
        guess = self.ahead.pop(layer, None)
        if guess is None:
            return None
        if guess[0] == expert:
            return self.prefetcher.collect(guess[1])
        self.prefetcher.cancel(guess[1])
        return None

    def speculate(self, expert, gate):
        token = self.prefetcher.issue(expert)  # leak: a low gate neither collects nor cancels
        if token is None:
            return None
        if gate < 0.05:
            return None
        return self.prefetcher.collect(token)

    def load_now(self, expert):
        token = self.prefetcher.issue(expert)  # clean: collected at once
        return None if token is None else self.prefetcher.collect(token)

    def race(self, experts):
        first = self.prefetcher.issue(experts[0])  # clean: collected below, if there was a second
        if first is None:
            return None
        second = self.prefetcher.issue(experts[1])  # leak: the loser is never cancelled
        self.router.note(experts, second is None)
        return self.prefetcher.collect(first)

"""Calls in progress, by endpoint, lent through a context manager."""
import threading
from collections import defaultdict
from contextlib import contextmanager


class Bulkhead:
    def __init__(self, limits, default=10):
        self._limits = limits
        self._default = default
        self._now = defaultdict(int)
        self._mu = threading.Lock()

    def limit(self, endpoint):
        return self._limits.get(endpoint, self._default)

    def step_in(self, endpoint):
        with self._mu:
            full = self._now[endpoint] >= self.limit(endpoint)
            if not full:
                self._now[endpoint] += 1
        return not full

    def step_out(self, endpoint):
        with self._mu:
            self._now[endpoint] -= 1

    @contextmanager
    def compartment(self, endpoint):
        if not self.step_in(endpoint):
            raise RuntimeError(f"{endpoint} is full")
        try:
            yield
        finally:
            self.step_out(endpoint)


class Api:
    def __init__(self, bulkhead, http):
        self.bulkhead = bulkhead
        self.http = http

    def get(self, endpoint, path):
        with self.bulkhead.compartment(endpoint):  # clean: with
            return self.http.get(endpoint + path)

    def get_or_none(self, endpoint, path):
        if not self.bulkhead.step_in(endpoint):  # leak: not stepped out after a server error
            return None
        reply = self.http.get(endpoint + path)
        if reply.status >= 500:
            return None
        self.bulkhead.step_out(endpoint)
        return reply

    def post(self, endpoint, body):
        if self.bulkhead.step_in(endpoint):  # clean: stepped out after the post
            reply = self.http.post(endpoint, body)
            self.bulkhead.step_out(endpoint)
            return reply
        return None


def has_space(bulkhead, endpoints):
    return [e for e in endpoints if bulkhead.step_in(e)]  # leak: stepped in to ask only

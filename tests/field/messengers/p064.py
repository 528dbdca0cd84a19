"""Callable token sources of an API proxy."""
import operator
import time


class TokenJar:
    def __init__(self, tokens):
        self._tokens = list(tokens)

    def withdraw(self):
        return self._tokens.pop() if self._tokens else None

    def refill(self, token):
        self._tokens.append(token)


class Patient:
    """Calls until a token comes or the patience is over."""

    def __init__(self, patience, pause=0.05):
        self.patience = patience
        self.pause = pause
        self.waited = 0.0

    def __call__(self, jar):
        end = time.monotonic() + self.patience
        token = jar.withdraw()  # clean: handed to the caller
        while token is None and time.monotonic() < end:
            time.sleep(self.pause)
            self.waited += self.pause
            token = jar.withdraw()  # clean: handed to the caller
        return token


class Proxy:
    def __init__(self, jar, backend):
        self.jar = jar
        self.backend = backend
        self.patient = Patient(2.0)
        self.eager = operator.methodcaller("withdraw")
        self.cache = {}

    def forward(self, path):
        token = self.patient(self.jar)  # clean: refilled
        if token is None:
            return 429, b""
        status, body = self.backend.get(path, token)
        self.jar.refill(token)
        return status, body

    def forward_cached(self, path):
        token = self.patient(self.jar)  # leak: a cached body is returned without refill
        if token is None:
            return 429, b""
        body = self.cache.get(path)
        if body is not None:
            return 200, body
        status, body = self.backend.get(path, token)
        self.cache[path] = body
        self.jar.refill(token)
        return status, body

    def try_forward(self, path):
        token = self.eager(self.jar)  # clean: refilled
        if token is None:
            return None
        status, body = self.backend.get(path, token)
        self.jar.refill(token)
        return body if status == 200 else None

    def forward_first(self, paths, choose):
        source = self.patient if choose == "patient" else self.eager
        token = source(self.jar)  # leak: no path answers 200, the loop ends without refill
        if token is None:
            return None
        for path in paths:
            status, body = self.backend.get(path, token)
            if status == 200:
                self.jar.refill(token)
                return body
        return None

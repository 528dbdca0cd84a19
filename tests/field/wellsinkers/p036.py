"""Trace spans: opened under the current one, ended by the same code."""
import time


class Tracer:
    def __init__(self, cap=256):
        self.names = [""] * cap
        self.began = [0.0] * cap
        self.parent = [-1] * cap
        self.unused = list(range(cap))[::-1]
        self.top = -1
        self.report = []

    def open_span(self, name):
        sid = self.unused.pop()
        self.names[sid] = name
        self.began[sid] = time.perf_counter()
        self.parent[sid] = self.top
        self.top = sid
        return sid

    def end_span(self, sid):
        self.report.append((self.names[sid], time.perf_counter() - self.began[sid]))
        self.top = self.parent[sid]
        self.parent[sid] = -1
        self.unused.append(sid)


class Gateway:
    def __init__(self, tracer, backends):
        self.tracer = tracer
        self.backends = backends
        self.request_span = None

    def on_request(self, path):
        self.request_span = self.tracer.open_span(path)  # clean: stored, ended by on_response

    def on_response(self):
        self.tracer.end_span(self.request_span)
        self.request_span = None

    def auth(self, user):
        sid = self.tracer.open_span("auth")  # leak: an unknown user leaves the span open
        if user not in self.backends.users:
            return False
        ok = self.backends.check(user)
        self.tracer.end_span(sid)
        return ok

    def fan_out(self, parts):
        sid = self.tracer.open_span("fan_out")  # clean: ended in finally
        try:
            return [self.backends.ask(p) for p in parts]
        finally:
            self.tracer.end_span(sid)


def compile_all(tracer, compiler, units):
    failed = []
    for unit in units:
        sid = tracer.open_span(unit)  # leak: failed units leave their span open
        if not compiler(unit):
            failed.append(unit)
            continue
        tracer.end_span(sid)
    return failed

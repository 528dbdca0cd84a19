"""Tracing: spans come from a ring of preallocated records and go back on finish."""
import time


class Span:
    __slots__ = ("tracer", "name", "start", "end", "active")

    def __init__(self, tracer):
        self.tracer = tracer
        self.active = False

    def finish(self):
        self.end = time.monotonic()
        self.active = False
        self.tracer.export(self)


class Tracer:
    def __init__(self, sink, records=512):
        self.sink = sink
        self._records = [Span(self) for _ in range(records)]
        self._cursor = 0

    def start_span(self, name):
        for _ in range(len(self._records)):
            span = self._records[self._cursor]
            self._cursor = (self._cursor + 1) % len(self._records)
            if not span.active:
                span.active = True
                span.name = name
                span.start = time.monotonic()
                return span
        raise RuntimeError("no span records left")

    def export(self, span):
        self.sink.append((span.name, span.end - span.start))


def handle(tracer, request, app):
    span = tracer.start_span(request.path)  # clean: finished in finally
    try:
        return app(request)
    finally:
        span.finish()


def cached_read(tracer, cache, db, key):
    span = tracer.start_span("read")  # leak: a cache hit returns with the span active
    if key in cache:
        return cache[key]
    cache[key] = db.get(key)
    span.finish()
    return cache[key]


def two_phase(tracer, prepare, commit):
    span = tracer.start_span("prepare")  # leak: overwritten by the span of the second phase
    prepare()
    span = tracer.start_span("commit")  # clean: finished at the end
    commit()
    span.finish()


class Job:
    def __init__(self, tracer):
        self.span = tracer.start_span("job")  # clean: finished in done()

    def done(self):
        self.span.finish()

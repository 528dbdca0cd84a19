"""A fixed table of profiler spans; a span is open until it is closed by its id."""
import time


class SpanTable:
    def __init__(self, size=128):
        self._start = [None] * size
        self._name = [""] * size
        self.totals = {}

    def open_span(self, name):
        for sid, start in enumerate(self._start):
            if start is None:
                self._start[sid] = time.perf_counter_ns()
                self._name[sid] = name
                return sid
        raise RuntimeError("no free span")

    def close_span(self, sid):
        took = time.perf_counter_ns() - self._start[sid]
        name = self._name[sid]
        self.totals[name] = self.totals.get(name, 0) + took
        self._start[sid] = None


spans = SpanTable()


def step(engine, batch):
    sid = spans.open_span("step")  # clean: closed in finally
    try:
        return engine.step(batch)
    finally:
        spans.close_span(sid)


def maybe_step(engine, batch):
    sid = spans.open_span("maybe_step")  # leak: an empty batch returns with the span open
    if not batch:
        return None
    out = engine.step(batch)
    spans.close_span(sid)
    return out


def drain(engine):
    while True:
        sid = spans.open_span("drain")  # leak: the break leaves the last span open
        if not engine.pending():
            break
        engine.step(engine.next_batch())
        spans.close_span(sid)


def traced_load(engine, path):
    sid = spans.open_span("load")  # clean: both branches close it
    if engine.cached(path):
        spans.close_span(sid)
        return engine.get(path)
    model = engine.load(path)
    spans.close_span(sid)
    return model


class Phase:
    def begin(self, name):
        self.sid = spans.open_span(name)  # clean: end() closes it

    def end(self):
        spans.close_span(self.sid)

"""Trace span identifiers bound to the running request."""
import contextvars

ACTIVE = contextvars.ContextVar("active_span", default=None)


class SpanIds:
    def __init__(self, count):
        self._ids = list(range(count))

    def open_span(self):
        return self._ids.pop() if self._ids else None

    def close_span(self, ident):
        self._ids.append(ident)


class Tracer:
    def __init__(self, ids, sink):
        self.ids = ids
        self.sink = sink

    def begin(self, name):
        ident = self.ids.open_span()  # clean: bound to the context, ended by end
        self.sink.append(("begin", ident, name))
        return ACTIVE.set(ident)

    def end(self, token):
        ident = ACTIVE.get()
        ACTIVE.reset(token)
        if ident is not None:
            self.sink.append(("end", ident))
            self.ids.close_span(ident)

    def run(self, name, fn, *args):
        token = self.begin(name)  # clean: ended in finally
        try:
            return fn(*args)
        finally:
            self.end(token)

    def run_sampled(self, name, rate, fn, *args):
        token = self.begin(name)  # leak: an unsampled run resets the variable and returns
        if hash(name) % 100 >= rate:
            ACTIVE.reset(token)
            return fn(*args)
        result = fn(*args)
        self.end(token)
        return result

    def mark(self, name):
        ident = self.ids.open_span()  # clean: closed after the record
        if ident is None:
            return False
        self.sink.append(("mark", ident, name))
        self.ids.close_span(ident)
        return True

    def link(self, name, parent):
        ident = self.ids.open_span()  # leak: the link is recorded, the span is not closed
        if ident is None:
            return False
        self.sink.append(("link", parent, name))
        return True

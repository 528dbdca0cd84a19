"""A measuring wrapper over a plain pool of parsers."""
import time


class PlainPool:
    def __init__(self, items):
        self._items = list(items)

    def pull(self):
        return self._items.pop() if self._items else None

    def push(self, item):
        self._items.append(item)


class TimedPool:
    """The same two halves, with how long each item was out."""

    def __init__(self, inner):
        self._inner = inner
        self._since = {}
        self.longest = 0.0

    def pull(self):
        item = self._inner.pull()  # clean: handed to the caller
        if item is not None:
            self._since[id(item)] = time.monotonic()
        return item

    def push(self, item):
        held = time.monotonic() - self._since.pop(id(item))
        self.longest = max(self.longest, held)
        self._inner.push(item)


class Ingest:
    def __init__(self, parsers, sink):
        self.parsers = parsers
        self.sink = sink

    def one(self, doc):
        parser = self.parsers.pull()  # clean: pushed back in finally
        if parser is None:
            return False
        try:
            self.sink.add(parser.parse(doc))
            return True
        finally:
            self.parsers.push(parser)

    def many(self, docs):
        for doc in docs:
            parser = self.parsers.pull()  # leak: empty documents keep the parser
            if parser is None:
                return
            if not doc:
                continue
            self.sink.add(parser.parse(doc))
            self.parsers.push(parser)


def sniff(ingest, doc):
    parser = ingest.parsers.pull()  # leak: pushed back only when XML
    if parser is None:
        return None
    kind = parser.guess(doc)
    if kind == "xml":
        ingest.parsers.push(parser)
    return kind

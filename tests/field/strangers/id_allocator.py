"""Small integer ids for in-flight RPCs."""
import heapq
import itertools


class IdAllocator(object):
    def __init__(self):
        self._heap = []
        self._fresh = itertools.count(1)

    def new_id(self):
        if self._heap:
            return heapq.heappop(self._heap)
        return next(self._fresh)

    def drop_id(self, ident):
        heapq.heappush(self._heap, ident)


class Rpc(object):
    def __init__(self, transport):
        self.ids = IdAllocator()
        self.transport = transport
        self.pending = {}

    def call(self, method, callback):
        ident = self.ids.new_id()  # clean: near miss, on_reply and on_close drop whatever is pending
        self.pending[ident] = callback
        self.transport.send(ident, method)
        return ident

    def on_reply(self, ident, value):
        callback = self.pending.pop(ident, None)
        if callback is None:
            return
        self.ids.drop_id(ident)
        callback(value)

    def on_close(self):
        for ident in list(self.pending):
            del self.pending[ident]
            self.ids.drop_id(ident)

    def notify(self, method):
        self.transport.send(self.ids.new_id(), method)  # leak: passed to send and never dropped

    def notify_many(self, methods):
        idents = []
        for method in methods:
            ident = self.ids.new_id()  # clean: near miss, dropped one by one in reverse below
            idents.append(ident)
            self.transport.send(ident, method)
        for ident in reversed(idents):
            self.ids.drop_id(ident)

    def call_sync(self, method):
        ident = self.ids.new_id()  # leak: empty reply breaks out of the loop into the final return
        self.transport.send(ident, method)
        reply = None
        while True:
            reply = self.transport.recv(ident)
            if reply == b"":
                break
            if reply is not None:
                self.ids.drop_id(ident)
                return reply
        return reply

    def probe(self, methods):
        ident = self.ids.new_id()  # clean: near miss, the else of the for drops it when no break did
        for method in methods:
            if self.transport.supports(method):
                self.ids.drop_id(ident)
                break
        else:
            self.ids.drop_id(ident)
        return bool(methods)

"""Token fan-out: a subscription is an id with a queue until it is cancelled."""
import itertools
import queue


class TokenHub:
    def __init__(self):
        self._seq = itertools.count()
        self._subs = {}

    def subscribe(self, request_id):
        sid = next(self._seq)
        self._subs[sid] = (request_id, queue.Queue())
        return sid

    def unsubscribe(self, sid):
        self._subs.pop(sid, None)

    def publish(self, request_id, token):
        for rid, q in self._subs.values():
            if rid == request_id:
                q.put(token)

    def next_token(self, sid, timeout):
        return self._subs[sid][1].get(timeout=timeout)


class SseHandler:
    def __init__(self, hub: TokenHub, engine):
        self.hub = hub
        self.engine = engine

    def serve(self, req, write):
        sid = self.hub.subscribe(req.id)  # clean: unsubscribed in finally
        try:
            while (tok := self.hub.next_token(sid, 30)) is not None:
                write(tok)
        finally:
            self.hub.unsubscribe(sid)

    def first_token(self, req):
        sid = self.hub.subscribe(req.id)  # leak: a rejected request returns while subscribed
        if not self.engine.submit(req):
            return None
        tok = self.hub.next_token(sid, 30)
        self.hub.unsubscribe(sid)
        return tok

    def tee(self, req, write):
        sid = self.hub.subscribe(req.id)  # leak: the end token returns from the loop without unsubscribing
        while True:
            tok = self.hub.next_token(sid, 30)
            if tok is None:
                return
            write(tok)

    def attach(self, req):
        self.sid = self.hub.subscribe(req.id)  # clean: detach() cancels it
        self.engine.submit(req)

    def detach(self):
        self.hub.unsubscribe(self.sid)

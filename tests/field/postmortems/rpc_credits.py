"""Credit-based flow control between the router and its engines."""
from __future__ import annotations

import itertools
import threading


class CreditGate:
    """Counted credits; try_spend() answers whether they were there."""

    def __init__(self, credits):
        self._credits = credits
        self._cv = threading.Condition()

    def spend(self, n=1):
        with self._cv:
            while self._credits < n:
                self._cv.wait()
            self._credits -= n  # clean: the caller owes refund(n)

    def try_spend(self, n=1):
        with self._cv:
            if self._credits < n:
                return False
            self._credits -= n  # clean: the caller owes refund(n) when told True
            return True

    def refund(self, n=1):
        with self._cv:
            self._credits += n
            self._cv.notify_all()


class Reply:
    def __init__(self, status, body=None):
        self.status = status
        self.body = body

    @property
    def ok(self):
        return self.status == 0


class Channel:
    def __init__(self, handler):
        self.handler = handler
        self.closed = False

    def call(self, method, body):
        if self.closed:
            return Reply(14)
        return Reply(0, self.handler(method, body))

    def call_async(self, method, body, done):
        """done(reply) is run exactly once, closed or not."""
        done(self.call(method, body))


class Stub:
    def __init__(self, channel, gate):
        self.channel = channel
        self.gate = gate
        self.calls = {}
        self._ids = itertools.count()

    def generate(self, prompt):
        self.gate.spend()  # leak: an unavailable engine is reported without the refund
        reply = self.channel.call("generate", prompt)
        if not reply.ok:
            return None
        self.gate.refund()
        return reply.body

    def embed(self, texts):
        self.gate.spend(len(texts))  # clean: near miss, the refund comes before the status is looked at
        reply = self.channel.call("embed", texts)
        self.gate.refund(len(texts))
        if not reply.ok:
            return []
        return reply.body

    def score(self, pairs):
        if not self.gate.try_spend(len(pairs)):  # leak: refunds the pairs that are left, after some were filtered
            return None
        pairs = [p for p in pairs if p[0] and p[1]]
        reply = self.channel.call("score", pairs)
        self.gate.refund(len(pairs))
        return reply.body

    def score_all(self, pairs):
        n = len(pairs)
        if not self.gate.try_spend(n):  # clean: near miss, n is kept from before the filter
            return None
        pairs = [p for p in pairs if p[0] and p[1]]
        reply = self.channel.call("score", pairs)
        self.gate.refund(n)
        return reply.body

    def fire(self, method, body):
        self.gate.spend()  # clean: near miss, the done callback refunds on every status

        def done(reply):
            self.gate.refund()

        self.channel.call_async(method, body, done)

    def fire_logged(self, method, body, log):
        self.gate.spend()  # leak: the callback refunds for good replies only

        def done(reply):
            if not reply.ok:
                log.append(reply.status)
                return
            self.gate.refund()

        self.channel.call_async(method, body, done)

    def open_stream(self, prompt):
        self.gate.spend(2)  # clean: close_stream() refunds both under the id
        cid = next(self._ids)
        self.calls[cid] = prompt
        return cid

    def close_stream(self, cid):
        if cid in self.calls:
            del self.calls[cid]
            self.gate.refund(2)

    def close(self):
        for cid in list(self.calls):
            self.close_stream(cid)
        self.channel.closed = True


class Router:
    def __init__(self, stubs, gate):
        self.stubs = stubs
        self.gate = gate

    def dispatch(self, prompts):
        out = []
        for p in prompts:
            if not self.gate.try_spend():  # leak: an empty prompt takes the continue with its credit spent
                break
            if not p:
                continue
            out.append(self.stubs[len(out) % len(self.stubs)].generate(p))
            self.gate.refund()
        return out

    def hedge(self, prompt):
        if not self.gate.try_spend():  # leak: the second credit refused, the first is not refunded
            return None
        if not self.gate.try_spend():  # clean: refunded together with the first
            return None
        replies = [stub.generate(prompt) for stub in self.stubs[:2]]
        self.gate.refund(2)
        return next((r for r in replies if r is not None), None)

    def hedge_or_single(self, prompt):
        if not self.gate.try_spend():  # clean: refunded at the end with or without the second
            return None
        second = self.gate.try_spend()  # clean: near miss, second records whether there is one to refund
        n = 2 if second else 1
        replies = [stub.generate(prompt) for stub in self.stubs[:n]]
        if second:
            self.gate.refund()
        self.gate.refund()
        return next((r for r in replies if r is not None), None)

    def drain(self, total):
        got = 0
        while got < total and self.gate.try_spend():  # clean: near miss, got counts them and all are refunded
            got += 1
        self.gate.refund(got)
        return got == total


def health(stub):
    stub.gate.spend()  # clean: refunded in the finally
    try:
        return stub.channel.call("health", None).ok
    finally:
        stub.gate.refund()

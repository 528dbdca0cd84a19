"""Subscriptions to topics: a token is held until it is cancelled."""
import itertools
from collections import defaultdict


class Hub:
    def __init__(self):
        self._topics = defaultdict(dict)
        self._where = {}
        self._next = itertools.count()

    def subscribe(self, topic, callback):
        token = next(self._next)
        self._topics[topic][token] = callback
        self._where[token] = topic
        return token

    def unsubscribe(self, token):
        topic = self._where.pop(token, None)
        if topic is not None:
            self._topics[topic].pop(token)

    def emit(self, topic, payload):
        for callback in list(self._topics[topic].values()):
            callback(payload)


class PriceView:
    def __init__(self, hub):
        self.hub = hub
        self.tokens = []
        self.last = {}

    def show(self, symbols):
        for symbol in symbols:
            token = self.hub.subscribe(symbol, self.last.update)  # clean: kept, dropped by hide
            self.tokens.append(token)

    def hide(self):
        while self.tokens:
            self.hub.unsubscribe(self.tokens.pop())

    def snapshot(self, symbol):
        seen = []
        token = self.hub.subscribe(symbol, seen.append)  # leak: an empty answer stays subscribed
        self.hub.emit("snapshot", symbol)
        if not seen:
            return None
        self.hub.unsubscribe(token)
        return seen[-1]


def collect(hub, topic, work):
    seen = []
    token = hub.subscribe(topic, seen.append)  # clean: unsubscribed in finally
    try:
        work()
    finally:
        hub.unsubscribe(token)
    return seen


def count_events(hub, topic, work):
    seen = []
    hub.subscribe(topic, seen.append)  # leak: token dropped
    work()
    return len(seen)

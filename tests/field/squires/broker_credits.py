"""Consumer side of the message broker: prefetch credits, deliveries, forwarding, request/reply."""
import itertools
import logging
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

LOG = logging.getLogger("broker.client")


class WindowFull(Exception): ...
class PoisonMessage(Exception): ...
class TransportError(Exception): ...


@dataclass(order=True)
class Message:
    priority: int
    key: str = field(compare=False)
    body: bytes = field(compare=False)
    headers: dict = field(compare=False, default_factory=dict)
    expires: float = field(compare=False, default=float("inf"))

    def expired(self):
        return time.time() > self.expires


@dataclass
class Delivery:
    tag: int
    msg: Message
    credit: int


class CreditWindow:
    """At most `size` messages are underway between the broker and us."""

    def __init__(self, size):
        self._bag = list(range(size))
        self._cv = threading.Condition()

    def take(self, block=True):
        with self._cv:
            while not self._bag:
                if not block:
                    raise WindowFull("no credit left")
                self._cv.wait(0.5)
            return self._bag.pop()  # clean: returned to the caller

    def refund(self, credit):
        with self._cv:
            self._bag.append(credit)
            self._cv.notify()


class Channel:
    """fetch() hands out deliveries; each one is to be settled by ack() or nack()."""

    def __init__(self, transport, queue_name, window):
        self.transport = transport
        self.queue_name = queue_name
        self.window = window
        self.stats = Counter()
        self._tags = itertools.count(1)

    def fetch(self):
        credit = self.window.take()  # leak: for an expired message None is returned and the credit is not refunded
        msg = self.transport.poll(self.queue_name)
        if msg is None:
            self.window.refund(credit)
            return None
        if msg.expired():
            self.stats["expired"] += 1
            return None
        self.stats["fetched"] += 1
        return Delivery(next(self._tags), msg, credit)

    def ack(self, delivery):
        self.transport.settle(self.queue_name, delivery.tag, requeue=False)
        self.window.refund(delivery.credit)

    def nack(self, delivery, requeue=True):
        self.transport.settle(self.queue_name, delivery.tag, requeue=requeue)
        self.window.refund(delivery.credit)


def consume(channel, handler, dead_letters, stop):
    while not stop.is_set():
        delivery = channel.fetch()  # leak: a poison message goes to the dead letters and the delivery is never settled
        if delivery is None:
            stop.wait(0.1)
            continue
        try:
            handler(delivery.msg)
        except PoisonMessage as exc:
            LOG.error("poison message %s: %s", delivery.msg.key, exc)
            dead_letters.append(delivery.msg)
            continue
        channel.ack(delivery)


def peek_headers(channel):
    delivery = channel.fetch()  # clean: put back with nack
    if delivery is None:
        return {}
    headers = dict(delivery.msg.headers, tag=delivery.tag)
    channel.nack(delivery, requeue=True)
    return headers


def drain(channel, limit, auto_ack=True):
    messages = []
    for _ in range(limit):
        delivery = channel.fetch()  # leak: without auto_ack only the message is kept and nobody can settle the delivery
        if delivery is None:
            break
        messages.append(delivery.msg)
        if auto_ack:
            channel.ack(delivery)
    return messages


def sample_bodies(channel):
    return [len(msg.body) for msg in drain(channel, 10, auto_ack=False)]


def fetch_most_urgent(channel, tries=8):
    best = channel.fetch()  # clean: near miss, returned, or put back when a better one comes along
    if best is None:
        return None
    for _ in range(tries):
        other = channel.fetch()  # clean: near miss, the worse one of the two is put back each time
        if other is None:
            break
        if other.msg.priority < best.msg.priority:
            best, other = other, best
        channel.nack(other)
    return best


def handle_urgent(channel, handler):
    delivery = fetch_most_urgent(channel)  # clean: acked, or put back on any exception
    if delivery is None:
        return False
    try:
        handler(delivery.msg)
    except BaseException:
        channel.nack(delivery)
        raise
    channel.ack(delivery)
    return True


class Batcher:
    """Collects deliveries and settles them together when the sink has taken the batch."""

    def __init__(self, channel, sink, size=100):
        self.channel, self.sink, self.size = channel, sink, size
        self._batch = []

    def step(self):
        delivery = self.channel.fetch()  # clean: near miss, sits in the batch until flush() acks or nacks all of it
        if delivery is not None:
            self._batch.append(delivery)
        if len(self._batch) >= self.size or delivery is None:
            self.flush()

    def flush(self):
        batch, self._batch = self._batch, []
        if not batch:
            return
        settle = self.channel.ack
        try:
            self.sink.write([d.msg.body for d in batch])
        except TransportError as exc:
            LOG.warning("sink refused %d messages: %s", len(batch), exc)
            settle = self.channel.nack
        for delivery in batch:
            settle(delivery)

    def close(self):
        self.flush()


class Forwarder:
    """Moves messages to another broker; the credit of the target comes back with the publisher confirm."""

    def __init__(self, source, transport, window):
        self.source, self.transport, self.window = source, transport, window
        self._unconfirmed = {}

    def relay(self):
        delivery = self.source.fetch()  # clean: put back when the window is full or the publish fails, acked else
        if delivery is None:
            return False
        try:
            credit = self.window.take(block=False)  # leak: on_returned() deletes the entry of an unroutable message without a refund
        except WindowFull:
            self.source.nack(delivery)
            return False
        seq = delivery.tag
        self._unconfirmed[seq] = credit
        try:
            self.transport.publish(delivery.msg, seq=seq, on_confirm=self.on_confirm, on_returned=self.on_returned)
        except TransportError:
            self.on_confirm(seq)
            self.source.nack(delivery)
            return False
        self.source.ack(delivery)
        return True

    def on_confirm(self, seq):
        credit = self._unconfirmed.pop(seq, None)
        if credit is not None:
            self.window.refund(credit)

    def on_returned(self, seq, reason):
        LOG.warning("message %d came back: %s", seq, reason)
        self._unconfirmed.pop(seq, None)


class Publisher:
    def __init__(self, transport, window, retries=3):
        self.transport, self.window, self.retries = transport, window, retries
        self._waiting = {}

    def send(self, msg):
        for attempt in range(self.retries):
            credit = self.window.take()  # leak: each failed attempt keeps its credit
            try:
                self.transport.publish(msg, seq=attempt)
            except TransportError as exc:
                LOG.info("attempt %d failed: %s", attempt, exc)
                continue
            self.window.refund(credit)
            return True
        return False

    def ask(self, msg):
        corr = uuid.uuid4().hex
        self._waiting[corr] = self.window.take()  # clean: near miss, refunded by on_reply(), which the failed publish and close() also use
        try:
            self.transport.publish(msg, seq=corr, on_reply=self.on_reply)
        except TransportError:
            self.on_reply(corr)
            raise
        return corr

    def on_reply(self, corr):
        credit = self._waiting.pop(corr, None)
        if credit is not None:
            self.window.refund(credit)

    def close(self):
        for corr in list(self._waiting):
            self.on_reply(corr)

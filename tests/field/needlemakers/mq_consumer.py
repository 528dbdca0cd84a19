"""Consumer of the inference job queue.

A delivery is invisible to other consumers until it is acked, nacked or its
visibility runs out. The broker limits unsettled deliveries per consumer, so an
unsettled one eats a credit for as long as the consumer lives.
"""
import json
import logging
import queue
import threading
import time

LOG = logging.getLogger(__name__)


class Delivery:
    def __init__(self, box, tag, body, attempts):
        self.box = box
        self.tag = tag
        self.body = body
        self.attempts = attempts


class Mailbox:
    """Local side of the broker: credits and unsettled tags."""

    def __init__(self, broker, topic, credits=32):
        self.broker = broker
        self.topic = topic
        self.credits = threading.Semaphore(credits)
        self.unsettled = {}
        self.mu = threading.Lock()

    def fetch(self, wait=1.0):
        if not self.credits.acquire(timeout=wait):  # clean: near miss, released when the broker has nothing, else with the delivery
            return None
        raw = self.broker.poll(self.topic, wait)
        if raw is None:
            self.credits.release()
            return None
        d = Delivery(self, raw["tag"], raw["body"], raw["attempts"])
        with self.mu:
            self.unsettled[d.tag] = d
        return d

    def fetch_fresh(self, max_age):
        if not self.credits.acquire(blocking=False):  # leak: credit kept when the message is older than max_age
            return None
        raw = self.broker.poll(self.topic, 0)
        if raw is None:
            self.credits.release()
            return None
        if time.time() - raw["ts"] > max_age:
            self.broker.nack(raw["tag"], requeue=False)
            return None
        d = Delivery(self, raw["tag"], raw["body"], raw["attempts"])
        with self.mu:
            self.unsettled[d.tag] = d
        return d

    def _settle(self, d):
        with self.mu:
            if self.unsettled.pop(d.tag, None) is None:
                return False
        self.credits.release()
        return True

    def ack(self, d):
        if self._settle(d):
            self.broker.ack(d.tag)

    def nack(self, d, requeue=True):
        if self._settle(d):
            self.broker.nack(d.tag, requeue=requeue)


class Worker:
    MAX_ATTEMPTS = 5

    def __init__(self, box, engine, dead_letters):
        self.box = box
        self.engine = engine
        self.dead = dead_letters
        self.inflight = {}
        self.backlog = queue.Queue(maxsize=64)
        self.stopping = False

    def step(self):
        d = self.box.fetch()  # clean: acked or nacked on every branch
        if d is None:
            return False
        try:
            job = json.loads(d.body)
        except ValueError:
            self.box.nack(d, requeue=False)
            return True
        if self.engine.run(job):
            self.box.ack(d)
        else:
            self.box.nack(d, requeue=d.attempts < self.MAX_ATTEMPTS)
        return True

    def loop(self):
        while not self.stopping:
            d = self.box.fetch()  # leak: a body that is no JSON is logged and skipped without ack or nack
            if d is None:
                continue
            try:
                job = json.loads(d.body)
            except ValueError:
                LOG.error("bad body, tag %s", d.tag)
                continue
            ok = self.engine.run(job)
            if ok:
                self.box.ack(d)
            else:
                self.box.nack(d)

    def loop_poison(self):
        while not self.stopping:
            d = self.box.fetch()  # clean: near miss, poison() nacks before the continue
            if d is None:
                continue
            if self.poison(d):
                continue
            self.engine.run(json.loads(d.body))
            self.box.ack(d)

    def poison(self, d):
        if d.attempts <= self.MAX_ATTEMPTS:
            return False
        self.dead.append(d.body)
        self.box.nack(d, requeue=False)
        return True

    def submit_async(self):
        d = self.box.fetch(wait=0.2)  # clean: near miss, moved into self.inflight, settled by on_done or stop
        if d is None:
            return
        self.inflight[d.tag] = d
        self.engine.submit(json.loads(d.body), callback=lambda ok, tag=d.tag: self.on_done(tag, ok))

    def on_done(self, tag, ok):
        d = self.inflight.pop(tag, None)
        if d is None:
            return
        if ok:
            self.box.ack(d)
        else:
            self.box.nack(d)

    def submit_fire(self):
        d = self.box.fetch(wait=0.2)  # leak: the callback settles only successful jobs
        if d is None:
            return

        def done(ok):
            if ok:
                self.box.ack(d)
            else:
                LOG.warning("job of tag %s failed", d.tag)

        self.engine.submit(json.loads(d.body), callback=done)

    def pull_batch(self, n):
        batch = []
        while len(batch) < n:
            d = self.box.fetch(wait=0.01)  # clean: the whole batch goes to the caller
            if d is None:
                break
            batch.append(d)
        return batch

    def run_batch(self, n):
        batch = self.pull_batch(n)  # clean: each delivery is acked or nacked in the loop
        if not batch:
            return 0
        oks = self.engine.run_many([json.loads(d.body) for d in batch])
        for d, ok in zip(batch, oks):
            (self.box.ack if ok else self.box.nack)(d)
        return len(batch)

    def run_grouped(self, n):
        groups = {}
        for d in self.pull_batch(n):  # leak: groups of fewer than two jobs are passed over unsettled
            groups.setdefault(json.loads(d.body)["model"], []).append(d)
        total = 0
        for model, members in groups.items():
            if len(members) < 2:
                continue
            self.engine.run_many([json.loads(m.body) for m in members])
            for m in members:
                self.box.ack(m)
            total += len(members)
        return total

    def feed(self):
        d = self.box.fetch()  # leak: dropped when the backlog is full
        if d is None:
            return False
        try:
            self.backlog.put_nowait(d)
        except queue.Full:
            LOG.info("backlog full")
            return False
        return True

    def feed_blocking(self):
        d = self.box.fetch()  # clean: near miss, put on the backlog which drain settles, else nacked
        if d is None:
            return False
        try:
            self.backlog.put(d, timeout=1.0)
        except queue.Full:
            self.box.nack(d)
            return False
        return True

    def drain(self):
        while True:
            try:
                d = self.backlog.get_nowait()  # clean: acked
            except queue.Empty:
                return
            self.engine.run(json.loads(d.body))
            self.box.ack(d)

    def peek_model(self):
        d = self.box.fetch_fresh(max_age=60)  # clean: nacked with requeue
        if d is None:
            return None
        name = json.loads(d.body).get("model")
        self.box.nack(d)
        return name

    def stop(self):
        self.stopping = True
        self.drain()
        for tag in list(self.inflight):
            self.on_done(tag, ok=False)

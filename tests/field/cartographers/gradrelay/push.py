"""Trainer's side: sends gradients."""
import logging
import queue
import threading

from . import codec
from .pools import StubUse

log = logging.getLogger(__name__)


class GradPusher:
    def __init__(self, pool, ring, hosts, limit=1.0):
        self.pool = pool
        self.ring = ring
        self.hosts = hosts
        self.limit = limit
        self.outbox = queue.Queue()
        self.retry = []

    def host_of(self, step, index):
        return self.hosts[(step + index) % len(self.hosts)]

    def push(self, step, index, grads):
        flat = codec.flatten_finite(self.pool, grads)  # clean: recycled in finally
        if flat is None:
            return False
        try:
            with StubUse(self.ring, self.host_of(step, index)) as stub:  # clean: with statement
                stub.push(step, index, flat)
        finally:
            self.pool.recycle(flat)
        return True

    def push_clipped(self, step, index, grads):
        flat = codec.flatten_into(self.pool, grads)  # clean: near miss, clipped() takes it over
        flat = codec.clipped(self.pool, flat, self.limit)  # clean: near miss, same or other bucket, recycled in finally
        try:
            with StubUse(self.ring, self.host_of(step, index)) as stub:  # clean: with statement
                stub.push(step, index, flat)
        finally:
            self.pool.recycle(flat)

    def push_later(self, step, index, grads):
        flat = codec.flatten_into(self.pool, grads)  # clean: near miss, outbox, sender or retry list recycles it
        self.outbox.put((step, index, flat))

    def start(self):
        t = threading.Thread(target=self._sender, daemon=True)
        t.start()
        return t

    def _sender(self):
        while True:
            step, index, flat = self.outbox.get()
            host = self.host_of(step, index)
            stub = self.ring.draw(host, 10.0)  # leak: a failed push continues with the stub drawn
            if stub is None:
                self.retry.append((step, index, flat))
                continue
            try:
                stub.push(step, index, flat)
            except OSError as exc:
                log.warning("push to %s: %s", host, exc)
                self.retry.append((step, index, flat))
                continue
            self.ring.stow(host, stub)
            self.pool.recycle(flat)

    def requeue(self):
        again, self.retry = self.retry, []
        for item in again:
            self.outbox.put(item)

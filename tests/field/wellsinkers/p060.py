"""Messages in flight: a receipt must be acked or nacked."""
import uuid
from collections import deque


class WorkQueue:
    def __init__(self, prefetch):
        self.ready = deque()
        self.prefetch = prefetch
        self.in_flight = {}
        self.dead = []

    def receive(self):
        if not self.ready or len(self.in_flight) >= self.prefetch:
            return None, None
        body = self.ready.popleft()
        receipt = uuid.uuid4().hex
        self.in_flight[receipt] = body
        return receipt, body

    def ack(self, receipt):
        del self.in_flight[receipt]

    def nack(self, receipt, requeue=True):
        body = self.in_flight.pop(receipt)
        (self.ready if requeue else self.dead).append(body)


class MailWorker:
    def __init__(self, queue, smtp):
        self.queue = queue
        self.smtp = smtp
        self.sent = set()

    def step(self):
        receipt, body = self.queue.receive()  # clean: acked or nacked
        if receipt is None:
            return False
        if self.smtp.send(body):
            self.queue.ack(receipt)
        else:
            self.queue.nack(receipt)
        return True

    def step_once_each(self):
        receipt, body = self.queue.receive()  # leak: a message seen before is not settled
        if receipt is None:
            return False
        if body in self.sent:
            return True
        self.sent.add(body)
        self.smtp.send(body)
        self.queue.ack(receipt)
        return True


def drain(queue, handler, clock, deadline):
    while True:
        receipt, body = queue.receive()  # leak: the break on time leaves one in flight
        if receipt is None or clock() > deadline:
            break
        handler(body)
        queue.ack(receipt)


def bury(queue):
    receipt, _ = queue.receive()  # clean: nacked to the dead letters
    if receipt:
        queue.nack(receipt, requeue=False)

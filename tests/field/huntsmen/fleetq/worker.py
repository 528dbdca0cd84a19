"""The loops of a worker machine."""
import logging
import time

from .runs import JobRun, Outcome
from .tickets import Malformed

log = logging.getLogger(__name__)

KNOWN = {"lora", "full", "eval"}


class ArchiveFull(Exception):
    pass


class Archive:
    def __init__(self, limit):
        self.limit = limit
        self.items = []

    def store(self, job_id, body):
        if len(self.items) >= self.limit:
            raise ArchiveFull(job_id)
        self.items.append((job_id, body))


class Worker:
    def __init__(self, queue, book, dead_queue, archive):
        self.queue, self.book = queue, book
        self.dead_queue, self.archive = dead_queue, archive
        self.runs = {}
        self.stopping = False
        self.cancelled = set()
        self.unknown = 0

    def loop(self):
        while not self.stopping:
            self._poll_runs()
            try:
                ticket = self.queue.receive(wait=2.0)  # leak: _dispatch() counts a job of unknown kind and returns without ack or nack
            except Malformed as exc:
                log.warning("malformed message %s", exc)
                continue
            if ticket is None:
                continue
            self._dispatch(ticket)
        self._shutdown()

    def _dispatch(self, ticket):
        kind = ticket.body.get("kind")
        if kind not in KNOWN:
            self.unknown += 1
            log.error("%s: unknown kind %r", ticket.job_id, kind)
            return
        if ticket.attempts > 5 or ticket.job_id in self.runs:
            self.queue.nack(ticket, delay=600.0)
            return
        gpus = self.book.take("full", ticket.body.get("gpus", 1))  # leak: _poll_runs() finishes a cancelled run, and finish() then does not put the devices back
        if not gpus:
            self.queue.nack(ticket, delay=15.0)
            return
        run = JobRun(self.queue, self.book, ticket, gpus)
        run.start()
        self.runs[ticket.job_id] = run

    def _poll_runs(self):
        for job_id, run in list(self.runs.items()):
            outcome = run.poll()
            if outcome is None and job_id in self.cancelled:
                run.terminate()
                outcome = Outcome.CANCELLED
            if outcome is None:
                run.heartbeat()
                continue
            del self.runs[job_id]
            self.cancelled.discard(job_id)
            run.finish(outcome)

    def _shutdown(self):
        for run in self.runs.values():
            run.terminate()
            run.finish(Outcome.ERROR)
        self.runs.clear()

    def evals_at_once(self, n, evaluate):
        """Small evaluations share one device; a job that was sent twice is evaluated once."""
        gpus = self.book.take_waiting("small", 1, timeout=30.0)  # clean: near miss, an empty list holds nothing, otherwise the finally puts it back
        if not gpus:
            return 0
        try:
            tickets = {}
            for t in self.queue.receive_many(n):  # clean: near miss, a repeated job is acked at once, the others in the second loop
                if t.job_id in tickets:
                    self.queue.ack(t)
                    continue
                tickets[t.job_id] = t
            for t in tickets.values():
                if evaluate(t.body, gpus[0]):
                    self.queue.ack(t)
                else:
                    self.queue.nack(t)
            return len(tickets)
        finally:
            self.book.put(gpus)

    def bury(self):
        """Move messages from the dead letter queue to the archive."""
        moved = 0
        while True:
            t = self.dead_queue.receive(wait=0.0)  # leak: a full archive breaks out of the loop with the ticket open
            if t is None:
                break
            try:
                self.archive.store(t.job_id, t.body)
            except ArchiveFull:
                log.error("archive is full, %s stays", t.job_id)
                break
            self.dead_queue.ack(t)
            moved += 1
        return moved

    def benchmark(self, n, measure):
        gpus = self.book.take_best(n)  # clean: put back in the finally, an empty list included
        try:
            began = time.perf_counter()
            return measure(gpus) / (time.perf_counter() - began) if gpus else None
        finally:
            self.book.put(gpus)

    def peek(self):
        t = self.queue.receive(wait=0.0)  # clean: near miss, nacked at once, the body is all that is returned
        if t is None:
            return None
        self.queue.nack(t)
        return t.body

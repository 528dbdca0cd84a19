"""A job under way."""
import enum
import logging
import subprocess
import time

log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"


class JobRun:
    """Holds the ticket and the devices of one job from start() to finish()."""

    def __init__(self, queue, book, ticket, gpus):
        self.queue, self.book = queue, book
        self.ticket, self.gpus = ticket, gpus
        self.proc = None
        self.started = None
        self.extended = 0

    def start(self):
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        self.proc = subprocess.Popen(["finetune", self.ticket.job_id], env=env)  # clean: poll() and terminate() await its end
        self.started = time.time()

    def poll(self):
        code = self.proc.poll()
        if code is None:
            return None
        return Outcome.OK if code == 0 else Outcome.ERROR

    def heartbeat(self, every=30.0):
        if time.time() - self.started > every * (self.extended + 1):
            self.queue.extend(self.ticket, 2 * every)
            self.extended += 1

    def terminate(self):
        self.proc.terminate()
        self.proc.wait()

    def finish(self, outcome):
        took = time.time() - self.started
        log.info("%s: %s after %.0fs", self.ticket.job_id, outcome.value, took)
        if outcome is Outcome.CANCELLED:
            self.queue.ack(self.ticket)
            return
        if outcome is Outcome.OK:
            self.queue.ack(self.ticket)
        else:
            self.queue.nack(self.ticket, delay=60.0 * self.ticket.attempts)
        self.book.put(self.gpus)

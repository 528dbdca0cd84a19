"""Threaded job runner: claims messages from a queue with a visibility lease, runs them in bounded slots."""
import heapq
import itertools
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

logger = logging.getLogger("jobs")


class Message:
    __slots__ = ("id", "kind", "body", "attempts", "priority")

    def __init__(self, id, kind, body, priority=0):
        self.id = id
        self.kind = kind
        self.body = body
        self.attempts = 0
        self.priority = priority


class Broker:
    """In-process broker. claim() moves a message to the in-flight table until ack() or nack()."""

    def __init__(self):
        self._heap = []
        self._order = itertools.count()
        self._inflight = {}
        self._dead = []
        self._cond = threading.Condition()

    def publish(self, msg):
        with self._cond:
            heapq.heappush(self._heap, (msg.priority, next(self._order), msg))
            self._cond.notify()

    def claim(self, timeout=1.0):
        with self._cond:
            if not self._heap:
                self._cond.wait(timeout)
            if not self._heap:
                return None
            _, _, msg = heapq.heappop(self._heap)
            msg.attempts += 1
            self._inflight[msg.id] = msg
            return msg

    def ack(self, msg):
        with self._cond:
            self._inflight.pop(msg.id, None)

    def nack(self, msg):
        with self._cond:
            if self._inflight.pop(msg.id, None) is not None:
                heapq.heappush(self._heap, (msg.priority, next(self._order), msg))
                self._cond.notify()

    def bury(self, msg):
        with self._cond:
            self._inflight.pop(msg.id, None)
            self._dead.append(msg)


class SlotTable:
    """A fixed number of execution slots per kind of job."""

    def __init__(self, limits):
        self._free = {kind: list(range(n)) for kind, n in limits.items()}
        self._guard = threading.Lock()

    def reserve(self, kind):
        with self._guard:
            free = self._free.get(kind)
            if not free:
                return None
            return kind, free.pop()

    def vacate(self, slot):
        kind, number = slot
        with self._guard:
            self._free[kind].append(number)


class Runner:
    MAX_ATTEMPTS = 5

    def __init__(self, broker, slots, handlers, threads=8):
        self.broker = broker
        self.slots = slots
        self.handlers = handlers
        self.executor = ThreadPoolExecutor(threads)
        self.stopping = threading.Event()
        self.running = {}
        self.stats = {"done": 0, "failed": 0, "skipped": 0}

    # -- the plain loop -------------------------------------------------------------------------
    def run_once(self):
        msg = self.broker.claim()  # clean: every branch acks, nacks or buries
        if msg is None:
            return False
        handler = self.handlers.get(msg.kind)
        if handler is None:
            self.broker.bury(msg)
            return True
        if handler(msg.body):
            self.broker.ack(msg)
            self.stats["done"] += 1
        elif msg.attempts >= self.MAX_ATTEMPTS:
            self.broker.bury(msg)
        else:
            self.broker.nack(msg)
        return True

    def drain(self, limit):
        """Runs up to limit messages in this thread, used by the command line."""
        seen = 0
        while seen < limit:
            msg = self.broker.claim(timeout=0.1)  # leak: a message of an unknown kind stays in flight
            if msg is None:
                break
            seen += 1
            handler = self.handlers.get(msg.kind)
            if handler is None:
                self.stats["skipped"] += 1
                continue
            ok = handler(msg.body)
            (self.broker.ack if ok else self.broker.nack)(msg)
        return seen

    def drain_kind(self, kind, limit):
        """Like drain, but puts the messages of other kinds back when finished."""
        others = []
        done = 0
        while done < limit:
            msg = self.broker.claim(timeout=0.1)  # clean: near miss, others are nacked after the loop
            if msg is None:
                break
            if msg.kind != kind:
                others.append(msg)
                continue
            self.handlers[kind](msg.body)
            self.broker.ack(msg)
            done += 1
        for msg in others:
            self.broker.nack(msg)
        return done

    # -- slots ----------------------------------------------------------------------------------
    def submit_next(self):
        msg = self.broker.claim()  # clean: nacked without a slot, otherwise finished by the callback
        if msg is None:
            return None
        slot = self.slots.reserve(msg.kind)  # clean: near miss, vacated in the done callback
        if slot is None:
            self.broker.nack(msg)
            return None
        future = self.executor.submit(self.handlers[msg.kind], msg.body)

        def finished(fut: Future):
            self.slots.vacate(slot)
            if fut.exception() is None:
                self.broker.ack(msg)
            else:
                self.broker.nack(msg)

        future.add_done_callback(finished)
        return future

    def submit_urgent(self, kind, body):
        slot = self.slots.reserve(kind)  # leak: the callback only counts, nobody vacates the slot
        if slot is None:
            logger.warning("no slot for urgent %s", kind)
            return None
        future = self.executor.submit(self.handlers[kind], body)

        def finished(fut: Future):
            key = "done" if fut.exception() is None else "failed"
            self.stats[key] += 1
            logger.info("urgent %s in slot %s: %s", kind, slot, key)

        future.add_done_callback(finished)
        return future

    # -- tracked jobs ---------------------------------------------------------------------------
    def start(self, job_id, kind, body):
        if job_id in self.running:
            return False
        slot = self.slots.reserve(kind)  # clean: kept in running, finish() and stop() vacate it
        if slot is None:
            return False
        self.running[job_id] = (slot, self.executor.submit(self.handlers[kind], body), time.time())
        return True

    def finish(self, job_id):
        entry = self.running.pop(job_id, None)
        if entry is None:
            return None
        slot, future, started = entry
        result = future.result()
        self.slots.vacate(slot)
        logger.info("job %s took %.1fs", job_id, time.time() - started)
        return result

    def stop(self):
        self.stopping.set()
        for job_id in list(self.running):
            slot, future, _ = self.running.pop(job_id)
            future.cancel()
            self.slots.vacate(slot)
        self.executor.shutdown(wait=False)


class Batcher:
    """Collects messages of one kind and hands them to a bulk handler."""

    def __init__(self, broker, size, handler):
        self.broker = broker
        self.size = size
        self.handler = handler
        self.pending = []
        self.last_flush = time.time()

    def poll(self):
        msg = self.broker.claim(timeout=0.2)  # clean: kept in pending, flush acks all of it
        if msg is None:
            return 0
        self.pending.append(msg)
        if len(self.pending) >= self.size:
            self.flush()
        return len(self.pending)

    def flush(self):
        batch, self.pending = self.pending, []
        logger.info("flush of %d", len(batch))
        self.handler([msg.body for msg in batch])
        for msg in batch:
            self.broker.ack(msg)
        self.last_flush = time.time()


class WindowedBatcher:
    """Keeps only the newest message per key inside a window."""

    def __init__(self, broker, sink, window=5.0):
        self.broker = broker
        self.sink = sink
        self.window = window
        self.newest = {}
        self.opened = time.time()

    def poll(self):
        msg = self.broker.claim(timeout=0.2)  # leak: an older message of the same key is overwritten unacked
        if msg is None:
            return
        self.newest[msg.body["key"]] = msg
        if time.time() - self.opened > self.window:
            self.close_window()

    def close_window(self):
        for key, msg in self.newest.items():
            self.sink(key, msg.body)
            self.broker.ack(msg)
        self.newest.clear()
        self.opened = time.time()


def peek_kinds(broker, count):
    """Which kinds wait at the head of the queue."""
    kinds = []
    for _ in range(count):
        msg = broker.claim(timeout=0)  # leak: only the kind is kept, the message stays in flight
        if msg is None:
            break
        kinds.append(msg.kind)
    return kinds


def run_exclusive(slots, kinds, action):
    """Holds one slot of every kind while action runs, all or nothing."""
    taken = []
    for kind in kinds:
        slot = slots.reserve(kind)  # clean: near miss, taken is rolled back on refusal and at the end
        if slot is None:
            for other in taken:
                slots.vacate(other)
            return False
        taken.append(slot)
    try:
        action()
    finally:
        for slot in taken:
            slots.vacate(slot)
    return True


def run_quorum(slots, kinds, need, action):
    """Runs action when at least `need` of the kinds have a free slot."""
    taken = []
    for kind in kinds:
        slot = slots.reserve(kind)  # leak: without a quorum the slots taken so far are not vacated
        if slot is not None:
            taken.append(slot)
    if len(taken) < need:
        logger.info("quorum missed: %d of %d", len(taken), need)
        return False
    try:
        action(len(taken))
    finally:
        for slot in taken:
            slots.vacate(slot)
    return True

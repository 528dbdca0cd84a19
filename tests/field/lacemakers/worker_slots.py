"""Inference worker slots: a heap of free slots by load, and the dispatcher that leases them to jobs."""
import heapq
import itertools
import logging
import threading

log = logging.getLogger("slots")


class Slot:
    def __init__(self, number, gpu, mem_gb):
        self.number = number
        self.gpu = gpu
        self.mem_gb = mem_gb
        self.load = 0.0
        self.job = None

    def __lt__(self, other):
        return self.load < other.load


class SlotHeap:
    def __init__(self, slots):
        self._heap = list(slots)
        heapq.heapify(self._heap)
        self._lock = threading.Lock()

    def grab(self):
        with self._lock:
            if not self._heap:
                return None
            return heapq.heappop(self._heap)  # clean: returned to the caller

    def drop(self, slot):
        slot.job = None
        with self._lock:
            heapq.heappush(self._heap, slot)

    def grab_fitting(self, mem_gb):
        """The least loaded slot with enough memory."""
        passed = []
        found = None
        with self._lock:
            while self._heap:
                slot = heapq.heappop(self._heap)  # clean: near miss, slots passed over are pushed back below
                if slot.mem_gb >= mem_gb:
                    found = slot
                    break
                passed.append(slot)
            for slot in passed:
                heapq.heappush(self._heap, slot)
        return found

    def grab_on(self, gpu):
        with self._lock:
            while self._heap:
                slot = heapq.heappop(self._heap)  # leak: slots of other GPUs are popped and never pushed back
                if slot.gpu == gpu:
                    return slot
        return None

    def grab_idle(self, max_load):
        with self._lock:
            if not self._heap:
                return None
            slot = heapq.heappop(self._heap)  # leak: a slot above the load limit is dropped
            if slot.load > max_load:
                return None
            return slot

    def peek_load(self):
        with self._lock:
            return self._heap[0].load if self._heap else 1.0

    def __len__(self):
        return len(self._heap)


class Job:
    def __init__(self, name, mem_gb=0, exclusive=False):
        self.name = name
        self.mem_gb = mem_gb
        self.exclusive = exclusive
        self.slot = None
        self.helpers = []
        self.state = "new"


class Dispatcher:
    def __init__(self, heap, runner, draft_heap=None):
        self.heap = heap
        self.runner = runner
        self.draft_heap = draft_heap
        self.speculative = draft_heap is not None
        self._draft = None
        self._live = {}
        self._ids = itertools.count(1)

    def start(self, job):
        slot = self.heap.grab_fitting(job.mem_gb)  # clean: rides in the job, which is live until finish()
        if slot is None:
            job.state = "waiting"
            return None
        job.slot = slot
        slot.job = job
        jid = next(self._ids)
        self._live[jid] = job
        return jid

    def finish(self, jid):
        job = self._live.pop(jid, None)
        if job is None:
            return
        job.state = "done"
        self.heap.drop(job.slot)
        for extra in job.helpers:
            self.heap.drop(extra)
        job.helpers.clear()

    def widen(self, jid, n):
        job = self._live[jid]
        for _ in range(n):
            extra = self.heap.grab()  # clean: near miss, in job.helpers, which finish() drops
            if extra is None:
                return False
            extra.job = job
            job.helpers.append(extra)
        return True

    def migrate(self, jid, mem_gb):
        job = self._live[jid]
        target = self.heap.grab_fitting(mem_gb)  # leak: kept when the checkpoint cannot be moved
        if target is None:
            return False
        if not self.runner.move(job.slot.number, target.number):
            log.info("job %s stays on %d", job.name, job.slot.number)
            return False
        self.heap.drop(job.slot)
        job.slot = target
        target.job = job
        return True

    def migrate_live(self, jid, mem_gb):
        job = self._live[jid]
        target = self.heap.grab_fitting(mem_gb)  # clean: near miss, whichever slot the job does not keep is dropped
        if target is None:
            return False
        moved = self.runner.move(job.slot.number, target.number)
        if moved:
            job.slot, target = target, job.slot
        self.heap.drop(target)
        return moved

    # speculative decoding: the draft slot is held between open_draft and close_draft
    def open_draft(self):
        if self.speculative:
            self._draft = self.draft_heap.grab()  # clean: near miss, close_draft tests the same flag

    def close_draft(self):
        if self.speculative and self._draft is not None:
            self.draft_heap.drop(self._draft)
            self._draft = None

    def decode(self, prompt):
        self.open_draft()  # clean: closed in finally
        try:
            return self.runner.decode(prompt, self._draft)
        finally:
            self.close_draft()

    def run_exclusive(self, job):
        """Exclusive jobs also hold the sibling slot, so that nothing else shares the GPU."""
        slot = self.heap.grab()  # clean: dropped at the end on both branches
        if slot is None:
            return None
        sibling = None
        if job.exclusive:
            sibling = self.heap.grab_fitting(slot.mem_gb)  # leak: dropped only when the job needs memory, not when exclusive
        out = self.runner.run(slot.number, job.name)
        if job.mem_gb > 0 and sibling is not None:
            self.heap.drop(sibling)
        self.heap.drop(slot)
        return out

    def run_paired(self, job):
        slot = self.heap.grab()  # clean: dropped at the end
        if slot is None:
            return None
        if job.exclusive:
            sibling = self.heap.grab()  # clean: near miss, the same flag guards its drop
        out = self.runner.run(slot.number, job.name)
        if job.exclusive and sibling is not None:
            self.heap.drop(sibling)
        self.heap.drop(slot)
        return out

    def preempt(self, name):
        victims = [jid for jid, job in self._live.items() if job.name == name]
        for jid in victims:
            job = self._live[jid]
            self.finish(jid)
            job.state = "preempted"
        return len(victims)

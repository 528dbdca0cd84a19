"""Continuous batching scheduler: request slots, preemption, and abort."""
from __future__ import annotations

from collections import deque


class ReqSlotPool:
    def __init__(self, size):
        self._free_slots = list(range(size))

    def available(self):
        return len(self._free_slots)

    def alloc_slot(self):
        if not self._free_slots:
            return None
        return self._free_slots.pop()  # clean: the caller gets the index

    def free_slot(self, idx):
        self._free_slots.append(idx)


class TokenPool:
    def __init__(self, size):
        self._free = list(range(size))

    def alloc(self, n):
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]  # clean: the run of indices is returned
        return out

    def free(self, idxs):
        self._free.extend(idxs)


class Request:
    def __init__(self, rid, prompt):
        self.rid = rid
        self.prompt = prompt
        self.slot = None
        self.tokens = []
        self.finished = False
        self.priority = 0


class Scheduler:
    def __init__(self, slots, tokens):
        self.slots = slots
        self.tokens = tokens
        self.waiting = deque()
        self.running = {}
        self.grammar_wait = {}

    def add(self, req):
        self.waiting.append(req)

    def admit(self):
        admitted = []
        while self.waiting:
            req = self.waiting[0]
            slot = self.slots.alloc_slot()  # leak: the break on missing token memory leaves the slot allocated
            if slot is None:
                break
            mem = self.tokens.alloc(len(req.prompt))  # clean: stored on the request
            if mem is None:
                break
            req.slot = slot
            req.tokens = mem
            self.running[req.rid] = req
            admitted.append(self.waiting.popleft())
        return admitted

    def admit_one(self, req):
        slot = self.slots.alloc_slot()  # clean: near miss, freed where the tokens are refused
        if slot is None:
            return False
        mem = self.tokens.alloc(len(req.prompt))  # clean: stored on the request, finish() frees it
        if mem is None:
            self.slots.free_slot(slot)
            return False
        req.slot, req.tokens = slot, mem
        self.running[req.rid] = req
        return True

    def decode_step(self):
        for req in list(self.running.values()):
            if req.rid not in self.running:
                continue
            if req.finished:
                self.finish(req.rid)
                continue
            one = self.tokens.alloc(1)  # clean: joins the request's tokens unless there was none
            if one is None:
                self.preempt()
                continue
            req.tokens = req.tokens + one

    def preempt(self):
        victim = min(self.running.values(), key=lambda r: r.priority, default=None)
        if victim is None:
            return None
        self.release(victim)
        del self.running[victim.rid]
        self.waiting.appendleft(victim)
        return victim

    def release(self, req):
        if req.slot is not None:
            self.slots.free_slot(req.slot)
            req.slot = None
        if req.tokens:
            self.tokens.free(req.tokens)
            req.tokens = []

    def finish(self, rid):
        req = self.running.pop(rid, None)
        if req is not None:
            self.release(req)

    def queue_grammar(self, req):
        slot = self.slots.alloc_slot()  # leak: abort() pops the grammar entry and drops the slot
        if slot is None:
            return False
        old = self.grammar_wait.pop(req.rid, None)
        if old is not None:
            self.slots.free_slot(old)
        self.grammar_wait[req.rid] = slot
        return True

    def abort(self, rid):
        self.finish(rid)
        self.grammar_wait.pop(rid, None)
        self.waiting = deque(r for r in self.waiting if r.rid != rid)

    def resize(self, rid, n):
        req = self.running.get(rid)
        if req is None:
            return False
        bigger = self.tokens.alloc(n)  # leak: takes the place of req.tokens, whose indices are still allocated
        if bigger is None:
            return False
        req.tokens = bigger
        return True

    def compact(self, rid):
        req = self.running.get(rid)
        if req is None:
            return False
        packed = self.tokens.alloc(len(req.tokens))  # clean: near miss, the old run is freed after the swap
        if packed is None:
            return False
        stale, req.tokens = req.tokens, packed
        self.tokens.free(stale)
        return True

    def dry_run(self, prompts):
        fits = 0
        for prompt in prompts:
            mem = self.tokens.alloc(len(prompt))  # leak: a prompt that ends the count is not freed
            if mem is None:
                return fits
            if len(mem) > 4096:
                break
            fits += 1
            self.tokens.free(mem)
        return fits


class ChunkedPrefill(Scheduler):
    partial = None

    def start_chunk(self, req):
        if self.partial is not None:
            return False
        if self.slots.available() == 0:
            return False
        req.slot = self.slots.alloc_slot()  # clean: near miss, end_chunk() or finish() releases the request
        self.partial = req
        return True

    def end_chunk(self, keep):
        req, self.partial = self.partial, None
        if req is None:
            return
        if keep:
            self.running[req.rid] = req
        else:
            self.release(req)

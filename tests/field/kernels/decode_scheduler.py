"""Continuous batching: decode slots, token budget and LoRA adapter pins."""
import heapq
import itertools

import torch


class SlotHeap:
    def __init__(self, n):
        self.heap = list(range(n))

    def seat(self):
        return heapq.heappop(self.heap) if self.heap else -1  # clean: handed to the caller

    def unseat(self, s):
        heapq.heappush(self.heap, s)


class TokenBudget:
    def __init__(self, total):
        self.room = total

    def charge(self, n):
        if n > self.room:
            return 0
        self.room -= n  # clean: the charge is the caller's
        return n

    def credit(self, n):
        self.room += n


class AdapterHandle:
    def __init__(self, shelf, name):
        self.shelf, self.name = shelf, name

    def let_go(self):
        self.shelf.users[self.name] -= 1


class AdapterShelf:
    def __init__(self, weights):
        self.weights = weights
        self.users = {k: 0 for k in weights}

    def grab(self, name):
        if name not in self.weights:
            return None
        self.users[name] += 1
        return AdapterHandle(self, name)


class Request:
    counter = itertools.count()

    def __init__(self, prompt, max_new, adapter=None):
        self.rid = next(self.counter)
        self.prompt, self.max_new, self.adapter = list(prompt), max_new, adapter
        self.slot, self.cost, self.handle = -1, 0, None
        self.output = []

    @property
    def complete(self):
        return len(self.output) >= self.max_new


class Scheduler:
    def __init__(self, model, slots, budget, shelf):
        self.model, self.slots, self.budget, self.shelf = model, slots, budget, shelf
        self.waiting, self.running = [], {}

    def submit(self, req):
        self.waiting.append(req)

    def _start(self, req):
        cost = self.budget.charge(len(req.prompt) + req.max_new)  # clean: near miss, zero charges nothing, credited when no seat is free, else kept in the request
        if not cost:
            return False
        slot = self.slots.seat()  # clean: near miss, minus one holds nothing, else kept in the running request until _stop
        if slot < 0:
            self.budget.credit(cost)
            return False
        req.cost, req.slot = cost, slot
        if req.adapter is not None:
            req.handle = self.shelf.grab(req.adapter)  # clean: near miss, _stop lets go of any handle in the request
        self.running[slot] = req
        return True

    def _stop(self, req):
        self.running.pop(req.slot)
        self.slots.unseat(req.slot)
        self.budget.credit(req.cost)
        if req.handle is not None:
            req.handle.let_go()
            req.handle = None

    def schedule(self):
        rest = []
        for req in self.waiting:
            if not self._start(req):  # clean: near miss, a started request is in running and step stops it
                rest.append(req)
        self.waiting = rest

    def step(self):
        self.schedule()
        for req in list(self.running.values()):
            ids = torch.tensor([req.prompt + req.output])
            req.output.append(int(self.model(ids)[0, -1].argmax()))
            if req.complete:
                self._stop(req)

    def start_urgent(self, req):
        slot = self.slots.seat()  # leak: an unaffordable request returns without unseat
        if slot < 0:
            return False
        cost = self.budget.charge(len(req.prompt) + req.max_new)  # clean: kept in the running request until _stop
        if cost == 0:
            return False
        req.slot, req.cost = slot, cost
        self.running[slot] = req
        return True

    def swap_adapter(self, req, name):
        new = self.shelf.grab(name)  # leak: the old handle in the request is overwritten and keeps its user count
        if new is None:
            return False
        req.handle = new
        req.adapter = name
        return True

    def change_adapter(self, req, name):
        new = self.shelf.grab(name)  # clean: near miss, the old handle is let go and the new one kept in the request
        if new is None:
            return False
        old, req.handle = req.handle, new
        if old is not None:
            old.let_go()
        req.adapter = name
        return True

    def adapter_norm(self, name):
        handle = self.shelf.grab(name)  # leak: the handle is never let go after the norm
        if handle is None:
            return None
        return float(self.shelf.weights[handle.name].norm())

    def score(self, prompts):
        """Run prompts that fit once, without generating."""
        scores = {}
        for i, p in enumerate(prompts):
            got = self.budget.charge(len(p))  # leak: an over-long prompt continues without the credit
            if not got:
                continue
            if len(p) > 4096:
                scores[i] = float("nan")
                continue
            scores[i] = float(self.model(torch.tensor([p])).logsumexp(-1).mean())
            self.budget.credit(got)
        return scores

    def drain(self):
        for req in list(self.running.values()):
            self._stop(req)

"""Continuous batching scheduler."""
from collections import deque

from .pages import PagePool
from .table import Request, SlotTable, make_pages


class Scheduler:
    def __init__(self, pool: PagePool, slots: SlotTable, page_size=16):
        self._pool = pool
        self._slots = slots
        self._page_size = page_size
        self.waiting = deque()
        self.running = []

    def submit(self, req: Request):
        self.waiting.append(req)

    def admit(self):
        while self.waiting:
            req = self.waiting[0]
            slot = self._slots.occupy(req)  # clean: near miss, vacated when the pages are missing, else by retire
            if slot is None:
                break
            pages = make_pages(self._pool, req, self._page_size)  # clean: moved into the request, dropped by retire
            if pages is None:
                self._slots.vacate(slot)
                break
            req.slot, req.pages = slot, pages
            self.running.append(self.waiting.popleft())

    def admit_urgent(self, req):
        pages = make_pages(self._pool, req, self._page_size)  # leak: dropped on the floor when there is no slot
        if pages is None:
            return False
        slot = self._slots.occupy(req)  # clean: moved into the request
        if slot is None:
            self.waiting.appendleft(req)
            return False
        req.slot, req.pages = slot, pages
        self.running.insert(0, req)
        return True

    def step(self, model):
        for req in list(self.running):
            total = len(req.prompt) + len(req.output)
            if total % self._page_size == 0 and not req.pages.extend(1):  # clean: grows the list of the request
                self.preempt(req)
                continue
            req.output.append(model(req))
            if req.finished:
                self.retire(req)

    def retire(self, req):
        self.running.remove(req)
        req.pages.drop()
        self._slots.vacate(req.slot)
        req.slot = req.pages = None

    def preempt(self, req):
        self.retire(req)
        req.output.clear()
        self.waiting.appendleft(req)

    def beam(self, req, width, model):
        best, best_score = None, float("-inf")
        for _ in range(width):
            pages = make_pages(self._pool, req, self._page_size)  # leak: a better beam replaces the best one without dropping it
            if pages is None:
                break
            score = model(req)
            if score <= best_score:
                pages.drop()
                continue
            best, best_score = pages, score
        if best is not None:
            best.drop()
        return best_score

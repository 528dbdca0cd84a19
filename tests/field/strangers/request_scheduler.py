"""Continuous batching: waiting, running and swapped requests over one page pool."""
from collections import deque


class PagePool:
    def __init__(self, pages):
        self._pages = list(range(pages))

    def alloc(self, n):
        if n > len(self._pages):
            return None
        taken, self._pages = self._pages[:n], self._pages[n:]
        return taken

    def dealloc(self, pages):
        self._pages.extend(pages)


class Request:
    def __init__(self, rid, tokens):
        self.rid = rid
        self.tokens = tokens
        self.pages = []
        self.finished = False
        self.aborted = False


class Draft:
    def __init__(self, rid):
        self.rid = rid
        self.scratch = None


class Scheduler:
    def __init__(self, pages):
        self.pool = PagePool(pages)
        self.waiting = deque()
        self.running = []
        self.drafts = {}

    def submit(self, request):
        self.waiting.append(request)

    def admit(self):
        while self.waiting:
            request = self.waiting[0]
            pages = self.pool.alloc(request.tokens)  # clean: near miss, moved into the request and freed by retire
            if pages is None:
                break
            self.waiting.popleft()
            request.pages = pages
            self.running.append(request)

    def retire(self):
        still = []
        for request in self.running:
            if request.finished or request.aborted:
                self.pool.dealloc(request.pages)
                request.pages = []
            else:
                still.append(request)
        self.running = still

    def start_draft(self, rid, n):
        if rid in self.drafts:
            return self.drafts[rid]
        pages = self.pool.alloc(n)  # leak: finish_draft takes the draft out and never frees its scratch
        if pages is None:
            return None
        draft = Draft(rid)
        draft.scratch = pages
        self.drafts[rid] = draft
        return draft

    def finish_draft(self, rid):
        draft = self.drafts.pop(rid, None)
        if draft is None:
            return 0
        return len(draft.scratch)

    def can_run(self, request):
        pages = self.pool.alloc(request.tokens)  # clean: near miss, freed when it was not None
        fits = pages is not None
        if fits:
            self.pool.dealloc(pages)
        return fits

    def extend(self, request, n):
        extra = self.pool.alloc(n)  # leak: an aborted request takes the early return
        if extra is None:
            return False
        if request.aborted:
            return False
        request.pages.extend(extra)
        return True

import threading

import torch


class PageBank:
    """Weight pages of equal size; `pull` returns one, `push` takes it back."""

    def __init__(self, n_pages, page_elems, device="cuda"):
        self.mem = torch.empty(n_pages, page_elems, dtype=torch.float16, device=device)
        self.page_elems = page_elems
        self._vacant = set(range(n_pages))
        self._lock = threading.Lock()

    def pull(self):
        with self._lock:
            if not self._vacant:
                return None
            return self._vacant.pop()  # clean: returned to the caller

    def push(self, page):
        with self._lock:
            self._vacant.add(page)

    def pull_list(self, n):
        """n pages or None."""
        pages = []
        while len(pages) < n:
            page = self.pull()  # leak: pages pulled before the bank ran dry are dropped with the list
            if page is None:
                return None
            pages.append(page)
        return pages

    def push_list(self, pages):
        for page in pages:
            self.push(page)


class StagingLease:
    """Pinned staging tensor of the loader, given back on exit."""

    def __init__(self, shelf, elems):
        self.shelf = shelf
        self.elems = elems
        self.tensor = None

    def __enter__(self):
        self.tensor = self.shelf.get(self.elems)  # clean: __exit__ gives it back in every case
        return self.tensor

    def __exit__(self, exc_type, exc, tb):
        self.shelf.put(self.tensor)
        self.tensor = None
        return False


class StagingShelf:
    def __init__(self):
        self._by_size = {}

    def get(self, elems):
        row = self._by_size.setdefault(elems, [])
        if row:
            return row.pop()  # clean: returned to the caller
        return torch.empty(elems, dtype=torch.float16, pin_memory=True)

    def put(self, t):
        self._by_size[t.numel()].append(t)

    def staged(self, elems):
        return StagingLease(self, elems)

"""A session owns pages and, while preempted, swap rows."""


class Session:
    def __init__(self, sid, store, swap):
        self.sid = sid
        self.store, self.swap = store, swap
        self.pages, self.rows = [], []
        self.length = 0
        self.draft = None

    def extend(self, n):
        need = -(-(self.length + n) // self.store.page_tokens) - len(self.pages)
        if need > 0:
            fresh = self.store.alloc_pages(need)  # clean: near miss, an empty list holds nothing and the others join the pages freed by end
            if not fresh:
                return False
            self.pages += fresh
        self.length += n
        return True

    def preempt(self):
        for p in self.pages:
            row = self.swap.book()  # clean: near miss, parked in rows, which resume and end unbook
            self.swap.host[row].copy_(self.store.data[p])
            self.rows.append(row)
            self.store.free(p)
        self.pages = []

    def resume(self):
        fresh = self.store.alloc_pages(len(self.rows))  # clean: near miss, a short store gives an empty list, else they join the pages
        if len(fresh) < len(self.rows):
            return False
        for p, row in zip(fresh, self.rows):
            self.store.data[p].copy_(self.swap.host[row])
            self.swap.unbook(row)
        self.pages += fresh
        self.rows = []
        return True

    def start_draft(self):
        page = self.store.alloc()  # leak: the page of a draft still open is overwritten
        if page is None:
            return False
        self.draft = page
        return True

    def accept_draft(self):
        if self.draft is not None:
            self.pages.append(self.draft)
            self.draft = None

    def reject_draft(self):
        if self.draft is not None:
            self.store.free(self.draft)
            self.draft = None

    def replace_last(self, values):
        page = self.store.alloc()  # leak: the old last page is overwritten in the list without free
        if page is None or not self.pages:
            if page is not None:
                self.store.free(page)
            return False
        self.store.data[page, : len(values)].copy_(values)
        self.pages[-1] = page
        return True

    def end(self):
        self.reject_draft()
        self.store.free_pages(self.pages)
        for row in self.rows:
            self.swap.unbook(row)
        self.pages, self.rows = [], []

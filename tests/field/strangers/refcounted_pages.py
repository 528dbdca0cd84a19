"""Copy-on-write pages: shared until written."""


class Page:
    def __init__(self, index):
        self.index = index
        self.refs = 0


class CowPages:
    def __init__(self, n):
        self.free_list = [Page(i) for i in range(n)]

    def alloc_page(self):
        page = self.free_list.pop()
        page.refs = 1
        return page

    def retain(self, page):
        page.refs += 1
        return page

    def drop(self, page):
        page.refs -= 1
        if page.refs == 0:
            self.free_list.append(page)


class Branch:
    """One beam. close() drops each page once."""

    def __init__(self, store, pages=()):
        self.store = store
        self.pages = list(pages)

    def grow(self):
        self.pages.append(self.store.alloc_page())  # clean: near miss, close drops what is in pages

    def fork(self):
        return Branch(self.store, [self.store.retain(p) for p in self.pages])  # clean: near miss, the new branch drops its own references

    def write(self, i):
        page = self.pages[i]
        if page.refs > 1:
            fresh = self.store.alloc_page()  # clean: near miss, takes the shared page's place in the table
            self.store.drop(page)
            self.pages[i] = fresh
            page = fresh
        return page.index

    def truncate(self, n):
        while len(self.pages) > n:
            self.store.drop(self.pages.pop())

    def close(self):
        self.truncate(0)


class Lazy:
    def __init__(self, store):
        self.store = store
        self.tail = None

    def write(self):
        if self.tail is None or self.tail.refs > 1:
            self.tail = self.store.alloc_page()  # leak: the shared tail loses this owner's reference
        return self.tail.index

    def close(self):
        if self.tail is not None:
            self.store.drop(self.tail)
            self.tail = None


def score(store, page, fn):
    store.retain(page)  # leak: a None score leaves the extra reference
    value = fn(page.index)
    if value is None:
        return 0.0
    store.drop(page)
    return value


def score_all(store, pages, fn):
    kept = [store.retain(p) for p in pages]  # clean: near miss, the list is emptied in finally
    try:
        return [fn(p.index) for p in kept]
    finally:
        while kept:
            store.drop(kept.pop())


def swap_last(store, branch):
    page = store.alloc_page()  # clean: near miss, dropped when there is nothing to swap with
    if not branch.pages:
        store.drop(page)
        return None
    old = branch.pages.pop()
    branch.pages.append(page)
    store.drop(old)
    return page.index

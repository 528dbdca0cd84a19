# take: P.fresh_page()
# give: X.unref()
# gets: value
# type: PageHeap
class OutOfPages(Exception):
    pass


class Page:
    def __init__(self, heap, number):
        self.heap = heap
        self.number = number
        self.refs = 0

    def ref(self):
        self.refs += 1
        return self

    def unref(self):
        if self.refs <= 0:
            raise RuntimeError("page %d: unref below zero" % self.number)
        self.refs -= 1
        if self.refs == 0:
            self.heap._home(self)


class PageHeap:
    """Copy-on-write pages. fresh_page() comes with one reference, forks call ref()."""

    def __init__(self, n_pages):
        self._resting = [Page(self, i) for i in reversed(range(n_pages))]

    def __len__(self):
        return len(self._resting)

    def fresh_page(self):
        if not self._resting:
            raise OutOfPages()
        return self._resting.pop().ref()

    def _home(self, page):
        self._resting.append(page)

# take: P.new_page()
# give: X.unref()
# gets: optional
# type: PageStore
import threading


class CountedPage:
    __slots__ = ("no", "refs", "_home")

    def __init__(self, no, home):
        self.no = no
        self.refs = 0
        self._home = home

    def ref(self):
        with self._home.lock:
            self.refs += 1
        return self

    def unref(self):
        with self._home.lock:
            if self.refs <= 0:
                raise RuntimeError(f"page {self.no}: unref without ref")
            self.refs -= 1
            if self.refs == 0:
                self._home.free_pages.add(self)


class PageStore:
    def __init__(self, total):
        self.lock = threading.Lock()
        self.free_pages = {CountedPage(i, self) for i in range(total)}
        self.total = total
        self.low_water = total

    def new_page(self):
        with self.lock:
            if not self.free_pages:
                return None
            page = self.free_pages.pop()
            page.refs = 1
            self.low_water = min(self.low_water, len(self.free_pages))
            return page

# take: P.page()
# give: P.unpage(X)
# gets: optional
class Core:
    def __init__(self, count):
        self._pages = deque(range(count))

    def page(self):
        return self._pages.popleft() if self._pages else None

    def unpage(self, page):
        self._pages.append(page)


class Counted:
    def __init__(self, core: Core):
        self._core = core
        self.hits = 0
        self.misses = 0

    def page(self):
        page = self._core.page()
        if page is None:
            self.misses += 1
        else:
            self.hits += 1
        return page

    def unpage(self, page):
        self._core.unpage(page)


class Pool:
    def __init__(self, counted: Counted):
        self._counted = counted
        self._lock = threading.Lock()

    def page(self):
        with self._lock:
            return self._counted.page()

    def unpage(self, page):
        with self._lock:
            self._counted.unpage(page)

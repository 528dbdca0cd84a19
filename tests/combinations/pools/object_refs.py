# take: P.get_page()
# give: P.put_page(X)
# gets: optional
class Page:
    def __init__(self, index):
        self.index = index
        self.refcount = 0


class Pool:
    def __init__(self, count):
        self._unused = deque(Page(i) for i in range(count))

    def get_page(self):
        if not self._unused:
            return None
        page = self._unused.popleft()
        page.refcount = 1
        return page

    def put_page(self, page):
        page.refcount -= 1
        if page.refcount == 0:
            self._unused.append(page)

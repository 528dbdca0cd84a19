# take: P.grab_page()
# give: P.drop_page(X)
# gets: negative
# type: PageChain
class PageChain:
    def __init__(self, n):
        self._link = [i + 1 for i in range(n)]
        self._link[-1] = -1
        self._first = 0

    def grab_page(self):
        page = self._first
        if page < 0:
            return -1
        self._first = self._link[page]
        return page

    def drop_page(self, page):
        self._link[page] = self._first
        self._first = page

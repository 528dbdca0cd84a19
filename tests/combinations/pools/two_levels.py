# take: P.block()
# give: P.unblock(X)
# gets: optional
class Page:
    def __init__(self, index, blocks):
        self.index = index
        self.empty = list(range(blocks))


class Pool:
    def __init__(self, pages, blocks):
        self.pages = [Page(i, blocks) for i in range(pages)]

    def block(self):
        for page in self.pages:
            if page.empty:
                return page.index, page.empty.pop()
        return None

    def unblock(self, where):
        page, block = where
        self.pages[page].empty.append(block)

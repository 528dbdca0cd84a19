# take: P.carve()
# give: P.absorb(X)
# gets: optional
# type: SubPages
class SubPages:
    """Big pages are cut into cells of which each page keeps a list."""

    def __init__(self, pages, per_page):
        self.whole = list(range(pages))
        self.cells = {}
        self.per_page = per_page

    def carve(self):
        for page, cells in self.cells.items():
            if cells:
                return page, cells.pop()
        if not self.whole:
            return None
        page = self.whole.pop()
        self.cells[page] = list(range(1, self.per_page))
        return page, 0

    def absorb(self, cell):
        page, at = cell
        self.cells[page].append(at)
        if len(self.cells[page]) == self.per_page:
            del self.cells[page]
            self.whole.append(page)

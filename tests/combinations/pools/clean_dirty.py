# take: P.get_page()
# give: P.put_page(X)
# gets: optional
# type: TwoTierPages
from collections import deque


class TwoTierPages:
    """
    `clean` pages are zeroed, `dirty` ones came back and still carry somebody's KV.
    A background tick scrubs; get_page scrubs on the spot only if it has to.
    """

    def __init__(self, npages, scrub):
        self.clean = deque(range(npages))
        self.dirty = deque()
        self.scrub = scrub

    def _wash_one(self):
        page = self.dirty[0]
        self.scrub(page)
        self.dirty.popleft()
        self.clean.append(page)

    def tick(self, budget=8):
        while self.dirty and budget:
            self._wash_one()
            budget -= 1

    def get_page(self):
        if not self.clean and self.dirty:
            self._wash_one()
        return self.clean.popleft() if self.clean else None

    def put_page(self, page):
        self.dirty.append(page)

"""Request objects and the table that maps request ids to them."""
from .pages import PageList, PagePool


class Request:
    def __init__(self, rid, prompt, max_new):
        self.rid = rid
        self.prompt = prompt
        self.max_new = max_new
        self.slot = None
        self.pages = None
        self.output = []

    @property
    def finished(self):
        return len(self.output) >= self.max_new


class SlotTable:
    def __init__(self, slots):
        self._vacant = set(range(slots))
        self.by_slot = {}

    def occupy(self, req):
        if not self._vacant:
            return None
        slot = self._vacant.pop()  # clean: entered in by_slot and returned
        self.by_slot[slot] = req
        return slot

    def vacate(self, slot):
        self.by_slot.pop(slot, None)
        self._vacant.add(slot)

    def rotate(self):
        for slot in list(self.by_slot):
            req = self.by_slot.pop(slot)
            if req.finished:
                req.slot = None
                self._vacant.add(slot)
                continue
            target = self._vacant.pop() if self._vacant else slot  # clean: near miss, takes over the request and the old slot becomes vacant
            self.by_slot[target] = req
            req.slot = target
            if target != slot:
                self._vacant.add(slot)


def make_pages(pool: PagePool, req: Request, page_size: int):
    need = -(-len(req.prompt) // page_size)
    pages = PageList(pool)
    if not pages.extend(need):  # clean: near miss, extend took nothing when it fails, else the list is returned
        return None
    return pages


def estimate(pool: PagePool, req: Request, page_size: int):
    """Free pages that would be left after the request came in."""
    pages = make_pages(pool, req, page_size)  # leak: the list is only looked at
    if pages is None:
        return -1
    return pool.available()

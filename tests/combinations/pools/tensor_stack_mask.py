# take: P.alloc_page()
# give: P.free_page(X)
# gets: optional
import torch


class Pool:
    def __init__(self, count):
        self.free_mask = torch.ones(count, dtype=torch.bool)

    def alloc_page(self):
        idx = torch.nonzero(self.free_mask)
        if idx.numel() == 0:
            return None
        page = int(idx[0])
        self.free_mask[page] = False
        return page

    def free_page(self, page):
        self.free_mask[page] = True

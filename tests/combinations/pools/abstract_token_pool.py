# take: P.alloc(n)
# give: P.free(X)
# gets: optional
# type: PagedTokenAllocator
import abc

import torch


class BaseTokenAllocator(abc.ABC):
    def __init__(self, size, page_size, device):
        self.size, self.page_size, self.device = size, page_size, device
        self.clear()

    @abc.abstractmethod
    def clear(self): ...

    @abc.abstractmethod
    def alloc(self, need): ...

    @abc.abstractmethod
    def free(self, indices): ...


class PagedTokenAllocator(BaseTokenAllocator):
    def __init__(self, size, page_size=16, device="cpu"):
        super().__init__(size, page_size, device)

    def clear(self):
        self.free_pages = torch.arange(1, self.size // self.page_size + 1, device=self.device)

    def alloc(self, need):
        num_pages = -(-need // self.page_size)
        if num_pages > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:num_pages], self.free_pages[num_pages:]
        offs = torch.arange(self.page_size, device=self.device)
        return (pages[:, None] * self.page_size + offs).reshape(-1)

    def free(self, indices):
        if indices.numel():
            self.free_pages = torch.cat((self.free_pages, torch.unique(indices // self.page_size)))

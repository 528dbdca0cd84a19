"""Pages counted by a counter, tracked in a bytearray bitmap."""
import torch


class PageStore:
    def __init__(self, pages, page_tokens, width):
        self.map = bytearray(pages)
        self.left = pages
        self.page_tokens = page_tokens
        self.data = torch.zeros(pages, page_tokens, width)

    def alloc(self):
        """A page number or None."""
        if self.left == 0:
            return None
        i = self.map.index(0)
        self.map[i] = 1  # clean: the page number goes to the caller
        self.left -= 1  # clean: the counted page goes to the caller
        return i

    def free(self, page):
        self.map[page] = 0
        self.left += 1

    def alloc_pages(self, n):
        if n > self.left:
            return []
        return [self.alloc() for _ in range(n)]  # clean: near miss, the room was checked so no None is in the list for the caller

    def free_pages(self, pages):
        for p in pages:
            self.free(p)


class SwapSpace:
    """Host rows for preempted sequences; rows are kept in a queue-like list."""

    def __init__(self, rows, page_tokens, width):
        self.host = torch.zeros(rows, page_tokens, width)
        self.idle = list(range(rows))

    def book(self):
        if not self.idle:
            raise MemoryError("swap space exhausted")
        return self.idle.pop(0)  # clean: handed to the caller

    def unbook(self, row):
        self.idle.append(row)

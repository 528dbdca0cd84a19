# TAKE: self._top -= 1 | X = self._stack[self._top]
# PUT: self._stack[self._top] = X | self._top += 1
# EMPTY: self._top == 0
# COUNT: self._top
# BAD: self.pages[X].isnan().any()
import torch


class Stack:
    def __init__(self, count: int, dim: int):
        self._stack = list(range(count))
        self._top = count
        self.pages = torch.zeros(count, dim)

    def pop_page(self):
        if self._top == 0:
            raise MemoryError("no page is free")
        self._top -= 1
        return self._stack[self._top]

    def push_page(self, page):
        self._stack[self._top] = page
        self._top += 1

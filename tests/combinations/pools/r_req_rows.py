# take: P.push_row()
# give: P.pop_row(X)
# gets: optional
# type: ReqRowStack
import numpy as np


class ReqRowStack:
    """Rows of the req -> token table. stk[0:top] are the vacant ones, pos[] tells where."""

    __slots__ = ("stk", "top", "live", "table")

    def __init__(self, rows, max_len):
        self.stk = np.arange(rows, dtype=np.int32)
        self.top = rows
        self.live = np.zeros(rows, dtype=bool)
        self.table = np.zeros((rows, max_len), dtype=np.int32)

    def push_row(self):
        if self.top == 0:
            return None
        self.top -= 1
        r = int(self.stk[self.top])
        self.live[r] = True
        return r

    def pop_row(self, r):
        assert self.live[r], r
        self.live[r] = False
        self.table[r, :] = 0
        self.stk[self.top] = r
        self.top += 1

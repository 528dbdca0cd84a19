# take: P.pop_row()
# give: P.push_row(X)
# gets: optional
import numpy as np


class Pool:
    def __init__(self, rows):
        self.stack = np.arange(rows)
        self.top = rows

    def pop_row(self):
        if self.top == 0:
            return None
        self.top -= 1
        return int(self.stack[self.top])

    def push_row(self, row):
        self.stack[self.top] = row
        self.top += 1

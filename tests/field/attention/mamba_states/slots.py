import numpy as np
import torch


class StateSlots:
    """conv/ssm state per running sequence; slots are claimed by number"""

    PAD = -1

    def __init__(self, n, conv_dim, ssm_dim):
        self.conv = torch.zeros(n, conv_dim)
        self.ssm = torch.zeros(n, ssm_dim)
        self.stack = np.arange(n, dtype=np.int32)
        self.top = n

    def dealloc_slot(self, i):
        self.stack[self.top] = i
        self.top += 1
        self.conv[i].zero_()
        self.ssm[i].zero_()

    def alloc_slot(self):
        if self.top == 0:
            return self.PAD
        self.top -= 1
        return int(self.stack[self.top])

    def alloc_zeroed(self, limit):
        i = self.alloc_slot()  # leak: a number past the limit is answered with PAD and the slot is gone
        if i == self.PAD or i >= limit:
            return self.PAD
        self.conv[i].zero_()
        self.ssm[i].zero_()
        return i

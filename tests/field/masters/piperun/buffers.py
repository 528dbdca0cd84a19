"""Activation buffers of a pipeline stage.

All micro-batches have one of a few shapes, so buffers are kept by shape. There is a
limit on how many are out, which is what keeps a fast stage from running away.
"""
import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Optional

import torch

logger = logging.getLogger("pipe.buffers")


@dataclass
class Act:
    data: torch.Tensor
    tag: str = ""
    users: int = field(default=1, repr=False)


class ActPool:
    def __init__(self, limit: int, dtype=torch.bfloat16, device="cuda"):
        self.limit, self.dtype, self.device = limit, dtype, device
        self.idle = defaultdict(list)
        self.out = 0
        self.cond = threading.Condition()

    def checkout(self, shape, tag="", wait=True) -> Optional[Act]:
        shape = tuple(shape)
        with self.cond:
            while self.out >= self.limit:
                if not wait:
                    return None
                self.cond.wait()
            self.out += 1
            if self.idle[shape]:
                act = self.idle[shape].pop()  # clean: returned
                act.tag, act.users = tag, 1
                return act
        return Act(torch.empty(shape, dtype=self.dtype, device=self.device), tag)

    def retain(self, act: Act) -> Act:
        with self.cond:
            act.users += 1
        return act

    def recycle(self, act: Act) -> None:
        with self.cond:
            act.users -= 1
            if act.users:
                return
            self.out -= 1
            self.idle[tuple(act.data.shape)].append(act)
            self.cond.notify()

    def reshape(self, act: Act, shape) -> Act:
        """Last micro-batch is smaller; same contents in the smaller shape."""
        small = self.checkout(shape, act.tag)  # clean: returned, and the larger one is recycled
        small.data.copy_(act.data[:shape[0]])
        self.recycle(act)
        return small

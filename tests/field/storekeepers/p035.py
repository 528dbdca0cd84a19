import numpy as np


class LaneBuffer:
    def __init__(self, pool, index):
        self.pool = pool
        self.index = index
        self.array = pool.slab[index]

    def free(self):
        self.pool.idle.append(self.index)


class LanePool:
    def __init__(self, lanes, width):
        self.slab = np.zeros((lanes, width), dtype=np.float32)
        self.idle = list(range(lanes))

    def allocate(self):
        return LaneBuffer(self, self.idle.pop())


class MicroBatches:
    """Forward results stay until their backward ran, in a ring of stages."""

    def __init__(self, pool, stages):
        self.pool = pool
        self.stages = stages
        self.slots = [None] * stages
        self.grads = [None] * stages
        self.loss = []

    def forward(self, step, x):
        at = step % self.stages
        lane = self.pool.allocate()  # leak: a step that comes round the ring overwrites a slot in use
        np.copyto(lane.array, x)
        self.slots[at] = lane
        return lane.array.sum()

    def backward(self, step, scale):
        at = step % self.stages
        lane = self.slots[at]
        if lane is None:
            return None
        if self.grads[at] is not None:
            self.grads[at].free()
        grad = self.pool.allocate()  # clean: freed before it is overwritten and in reduce
        np.multiply(lane.array, scale, out=grad.array)
        self.grads[at] = grad
        lane.free()
        self.slots[at] = None
        return grad.array.mean()

    def reduce(self):
        total = np.zeros_like(self.pool.slab[0])
        for at, grad in enumerate(self.grads):
            if grad is None:
                continue
            total += grad.array
            grad.free()
            self.grads[at] = None
        return total

    def flush(self):
        for at, lane in enumerate(self.slots):
            if lane is not None:
                lane.free()
                self.slots[at] = None


class Averager:
    def __init__(self, pool):
        self.acc = pool.allocate()  # clean: close frees it
        self.tmp = pool.allocate()  # leak: close frees the accumulator only
        self.n = 0

    def add(self, x):
        np.copyto(self.tmp.array, x)
        self.acc.array += self.tmp.array
        self.n += 1

    def close(self):
        result = self.acc.array / max(1, self.n)
        self.acc.free()
        self.acc = self.tmp = None
        return result

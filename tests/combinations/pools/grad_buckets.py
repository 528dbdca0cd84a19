# take: P.next_bucket()
# give: P.done_with(X)
# gets: value
# type: BucketRotation
import torch


class BucketRotation:
    """Flat gradient buckets for overlapped reduce-scatter (ping-pong, normally depth 2 or 3)."""

    def __init__(self, numel, depth=2, dtype=torch.float32):
        self._flat = torch.zeros(depth, numel, dtype=dtype)
        self._busy = torch.zeros(depth, dtype=torch.bool)
        self._turn = 0

    @property
    def depth(self):
        return self._flat.size(0)

    def next_bucket(self):
        for k in range(self.depth):
            i = (self._turn + k) % self.depth
            if not self._busy[i]:
                break
        else:
            raise RuntimeError("all gradient buckets are still being reduced")
        self._busy[i] = True
        self._turn = (i + 1) % self.depth
        return i

    def done_with(self, i):
        self._flat[i].zero_()
        self._busy[i] = False

"""Growing pool of activation buffers, doubling when empty."""


class ActivationPool:
    def __init__(self, make, start=4, ceiling=256):
        self._make = make
        self._ceiling = ceiling
        self._buffers = [make() for _ in range(start)]
        self._spare = set(range(start))

    def _grow(self):
        have = len(self._buffers)
        more = min(have, self._ceiling - have)
        for i in range(have, have + more):
            self._buffers.append(self._make())
            self._spare.add(i)

    def request(self):
        if not self._spare:
            self._grow()
        if not self._spare:
            raise MemoryError("activation pool is at its ceiling")
        return self._spare.pop()

    def yield_back(self, index):
        self._spare.add(index)

    def __getitem__(self, index):
        return self._buffers[index]


class PipelineStage:
    def __init__(self, pool: ActivationPool, layer, peer):
        self.pool = pool
        self.layer = layer
        self.peer = peer
        self.saved = {}

    def forward(self, mb, x):
        i = self.pool.request()  # clean: saved for backward(), which yields it back
        self.layer.run(x, self.pool[i])
        self.saved[mb] = i
        self.peer.send(self.pool[i])

    def backward(self, mb, grad):
        i = self.saved.pop(mb)
        try:
            return self.layer.grad(self.pool[i], grad)
        finally:
            self.pool.yield_back(i)

    def infer(self, x):
        i = self.pool.request()  # leak: the last stage returns with the buffer
        self.layer.run(x, self.pool[i])
        if self.peer is None:
            return self.layer.head(x)
        self.peer.send(self.pool[i])
        self.pool.yield_back(i)

    def loss(self, x, target):
        i = self.pool.request()  # clean: yielded back before the return
        value = self.layer.loss(x, target, out=self.pool[i])
        self.pool.yield_back(i)
        return value

    def recompute(self, xs):
        for x in xs:
            i = self.pool.request()  # leak: overwritten in each turn, only the last is yielded back
            self.layer.run(x, self.pool[i])
        self.pool.yield_back(i)

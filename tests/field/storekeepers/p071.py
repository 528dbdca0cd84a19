class Kernel:
    def __init__(self, number):
        self.number = number
        self.args = None


class KernelPool:
    def __init__(self, n):
        self._kernels = [Kernel(i) for i in range(n)]

    def prepare(self, args):
        kernel = self._kernels.pop()
        kernel.args = args
        return kernel

    def retire(self, kernel):
        kernel.args = None
        self._kernels.append(kernel)


class BaseRunner:
    """Subclasses put what they prepared into self.owned or override cleanup()."""

    def __init__(self, kernels):
        self.kernels = kernels
        self.owned = []

    def own(self, args):
        kernel = self.kernels.prepare(args)  # clean: close retires all that are owned
        self.owned.append(kernel)
        return kernel.number

    def cleanup(self):
        pass

    def close(self):
        self.cleanup()
        while self.owned:
            self.kernels.retire(self.owned.pop())


class MatmulRunner(BaseRunner):
    def __init__(self, kernels, shape):
        super().__init__(kernels)
        self.shape = shape
        self.tiled = kernels.prepare(("tiled", shape))  # clean: cleanup retires it
        self.tail = kernels.prepare(("tail", shape))  # leak: reshape prepares another one over it

    def reshape(self, shape):
        self.shape = shape
        self.tiled.args = ("tiled", shape)
        self.tail = self.kernels.prepare(("tail", shape))  # leak: the next reshape overwrites it

    def cleanup(self):
        for kernel in (self.tiled, self.tail):
            self.kernels.retire(kernel)


class AttentionRunner(BaseRunner):
    def __init__(self, kernels, heads):
        super().__init__(kernels)
        self.heads = heads
        self.mask = kernels.prepare(("mask", heads))  # leak: cleanup overridden without it
        self.bias = None

    def set_bias(self, table):
        if self.bias is not None:
            self.kernels.retire(self.bias)
        self.bias = self.kernels.prepare(("bias", tuple(table)))  # clean: replaced and cleaned up with retire

    def run(self, q, k):
        scores = [a * b for a, b in zip(q, k)]
        return scores[: self.heads], self.mask.number

    def cleanup(self):
        if self.bias is not None:
            self.kernels.retire(self.bias)
            self.bias = None


def autotune(kernels, candidates, clock):
    best, best_time = None, float("inf")
    for args in candidates:
        kernel = kernels.prepare(args)  # clean: retired at the end of each round
        begun = clock()
        elapsed = clock() - begun + kernel.number
        if elapsed < best_time:
            best, best_time = args, elapsed
        kernels.retire(kernel)
    return best

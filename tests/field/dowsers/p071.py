"""Side table of quantization state, keyed by the identity of the tensor."""


class QuantSide:
    def __init__(self, n):
        self.scales = [None] * n
        self._slot = {}
        self._idle = list(range(n))

    def bind(self, tensor):
        key = id(tensor)
        if key in self._slot:
            return False
        if not self._idle:
            return False
        self._slot[key] = self._idle.pop()
        self.scales[self._slot[key]] = tensor.absmax()
        return True

    def unbind(self, tensor):
        slot = self._slot.pop(id(tensor))
        self.scales[slot] = None
        self._idle.append(slot)

    def scale(self, tensor):
        return self.scales[self._slot[id(tensor)]]


class Int8Matmul:
    def __init__(self, side: QuantSide, kernel):
        self.side = side
        self.kernel = kernel
        self.weights = []

    def add_weight(self, w):
        if self.side.bind(w):  # clean: w goes into weights, unload() unbinds it
            self.weights.append(w)

    def unload(self):
        while self.weights:
            self.side.unbind(self.weights.pop())

    def matmul(self, x, w):
        if not self.side.bind(x):  # clean: unbound in finally
            return self.kernel.fp16(x, w)
        try:
            return self.kernel.int8(x, w, self.side.scale(x), self.side.scale(w))
        finally:
            self.side.unbind(x)

    def matmul_outliers(self, x, w):
        if not self.side.bind(x):  # leak: with outliers it goes the fp16 way without unbind
            return self.kernel.fp16(x, w)
        if self.side.scale(x) > 100:
            return self.kernel.fp16(x, w)
        y = self.kernel.int8(x, w, self.side.scale(x), self.side.scale(w))
        self.side.unbind(x)
        return y

    def observe(self, xs):
        ranges = []
        for x in xs:
            if self.side.bind(x):  # leak: bound for its scale only, never unbound
                ranges.append(self.side.scale(x))
        return max(ranges, default=0.0)

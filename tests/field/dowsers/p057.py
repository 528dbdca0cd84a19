"""ZeRO-3 style parameters: gathered while some module needs them."""


class ParamCoordinator:
    def __init__(self, group, limit):
        self.group = group
        self.limit = limit
        self.live_numel = 0
        self._holders = {}

    def gather(self, param):
        holders = self._holders.get(param.id, 0)
        if holders == 0:
            if self.live_numel + param.numel > self.limit:
                raise MemoryError("too many live parameters")
            param.full = self.group.all_gather(param.shard)
            self.live_numel += param.numel
        self._holders[param.id] = holders + 1
        return param.full

    def partition(self, param):
        self._holders[param.id] -= 1
        if not self._holders[param.id]:
            param.full = None
            self.live_numel -= param.numel


class ZeroModule:
    def __init__(self, coord: ParamCoordinator, weight, bias=None):
        self.coord = coord
        self.weight = weight
        self.bias = bias

    def forward(self, x):
        w = self.coord.gather(self.weight)  # clean: partitioned in finally
        try:
            return x @ w
        finally:
            self.coord.partition(self.weight)

    def forward_bias(self, x):
        w = self.coord.gather(self.weight)  # leak: without a bias it returns unpartitioned
        y = x @ w
        if self.bias is None:
            return y
        y = y + self.coord.gather(self.bias)  # clean: partitioned below
        self.coord.partition(self.bias)
        self.coord.partition(self.weight)
        return y

    def pre_backward(self):
        self.full = self.coord.gather(self.weight)  # clean: post_backward() partitions it

    def post_backward(self):
        self.full = None
        self.coord.partition(self.weight)

    def consolidated(self, params, sink):
        for p in params:
            full = self.coord.gather(p)  # leak: continue for a frozen parameter
            if not p.trainable:
                continue
            sink.write(p.id, full)
            self.coord.partition(p)

    def norm(self):
        total = self.coord.gather(self.weight).norm()  # clean: partitioned on the next line
        self.coord.partition(self.weight)
        return total

"""Views narrowed out of one large torch tensor, given back by their data pointer."""
import torch


class FlatPool:
    def __init__(self, numel, chunk, dtype=torch.float16):
        self.flat = torch.empty(numel, dtype=dtype)
        self.chunk = chunk
        self.taken = {}
        self.vacant = list(range(0, numel - chunk + 1, chunk))

    @property
    def free_bytes(self):
        return len(self.vacant) * self.chunk * self.flat.element_size()

    def narrow(self):
        if not self.vacant:
            raise torch.cuda.OutOfMemoryError("flat pool")
        at = self.vacant.pop()
        view = self.flat.narrow(0, at, self.chunk)
        self.taken[view.data_ptr()] = at
        return view

    def widen(self, view):
        self.vacant.append(self.taken.pop(view.data_ptr()))


class GradAccumulator:
    def __init__(self, pool: FlatPool):
        self.pool = pool
        self.views = {}

    def view_for(self, name):
        if name not in self.views:
            self.views[name] = self.pool.narrow()  # clean: kept by name, reset() widens all
            self.views[name].zero_()
        return self.views[name]

    def reset(self):
        for view in self.views.values():
            self.pool.widen(view)
        self.views = {}

    def norm(self, grad):
        tmp = self.pool.narrow()  # clean: widened in finally
        try:
            torch.mul(grad, grad, out=tmp)
            return tmp.sum().sqrt().item()
        finally:
            self.pool.widen(tmp)

    def clip(self, grad, limit):
        tmp = self.pool.narrow()  # leak: under the limit it returns without widening
        torch.abs(grad, out=tmp)
        if tmp.max() <= limit:
            return grad
        scaled = grad * (limit / tmp.max())
        self.pool.widen(tmp)
        return scaled

    def sum_all(self, grads):
        acc = self.pool.narrow()  # leak: not widened if there is nothing to sum
        acc.zero_()
        total = None
        for g in grads:
            acc.add_(g)
        if grads:
            total = acc.sum().item()
            self.pool.widen(acc)
        return total

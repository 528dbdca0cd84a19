"""Adam whose moments are swapped in for the update."""
from .swapper import SwapError


class SwappedAdam:
    def __init__(self, params, swapper, lr=1e-4, betas=(0.9, 0.999), eps=1e-8):
        self.params = dict(params)
        self.swapper = swapper
        self.lr, self.betas, self.eps = lr, betas, eps
        self.t = 0
        self.deferred = []

    def step(self):
        self.t += 1
        for name, p in self.params.items():
            if p.grad is None:
                continue
            n = p.numel()
            try:
                m = self.swapper.swap_in(name + ".m", n)  # clean: near miss, swapped out by the finally of _update() or by the handler
                v = self.swapper.swap_in(name + ".v", n)  # clean: near miss, swapped out by the finally of _update()
            except SwapError:
                if name + ".m" in self.swapper.resident:
                    self.swapper.swap_out(name + ".m", n, dirty=False)
                self.deferred.append(name)
                continue
            self._update(name, p, m, v)

    def _update(self, name, p, m, v):
        n = p.numel()
        b1, b2 = self.betas
        try:
            g = p.grad.detach().float().cpu().view(-1)
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            upd = m / (1 - b1**self.t) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
            p.data.view(-1).add_(upd.to(p.device, p.dtype), alpha=-self.lr)
        finally:
            self.swapper.swap_out(name + ".m", n)
            self.swapper.swap_out(name + ".v", n)

    def retry_deferred(self):
        again, self.deferred = self.deferred, []
        for name in again:
            n = self.params[name].numel()
            buf = self.swapper.buffers.fetch_fitting(n)  # leak: a parameter without a gradient continues with buf out
            if buf is None:
                self.deferred.append(name)
                continue
            if self.params[name].grad is None:
                continue
            buf.data[:n].copy_(self.params[name].grad.detach().float().view(-1))
            self.params[name].data.view(-1).add_(buf.data[:n].sign().to(self.params[name].device), alpha=-self.lr)
            self.swapper.buffers.stow(buf)

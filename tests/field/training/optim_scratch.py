import math

import torch
from torch.optim import Optimizer


class Scratch:
    """Stack-like arena for optimiser temporaries. Keyed by (numel, dtype)."""

    def __init__(self):
        self.shelves = {}
        self.out = 0

    def lend(self, like):
        key = (like.numel(), like.dtype)
        shelf = self.shelves.setdefault(key, [])
        self.out += 1
        t = shelf.pop() if shelf else torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return t.view(like.shape)

    def restore(self, t):
        self.out -= 1
        self.shelves.setdefault((t.numel(), t.dtype), []).append(t.view(-1))


class LambScratch(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, scratch=None):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.scratch = scratch or Scratch()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["m"] = torch.zeros_like(p)
                    st["v"] = torch.zeros_like(p)
                upd = self.scratch.lend(p)  # leak: a zero trust ratio goes on to the next parameter with upd out
                st["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                st["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                torch.sqrt(st["v"], out=upd)
                upd.add_(group["eps"])
                torch.div(st["m"], upd, out=upd)
                ratio = self._trust(p, upd)
                if ratio == 0.0:
                    continue
                p.add_(upd, alpha=-group["lr"] * ratio)
                self.scratch.restore(upd)

    def _trust(self, p, upd):
        wn, un = float(p.norm()), float(upd.norm())
        if wn == 0.0 or un == 0.0:
            return 0.0
        return wn / un

    @torch.no_grad()
    def grad_norm(self):
        total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                sq = self.scratch.lend(p)  # clean: restored in the same round
                torch.mul(p.grad, p.grad, out=sq)
                total += float(sq.sum())
                self.scratch.restore(sq)
        return math.sqrt(total)

    @torch.no_grad()
    def decay(self, wd):
        for group in self.param_groups:
            for p in group["params"]:
                tmp = self.scratch.lend(p)  # leak: rebound by the out-of-place product
                tmp.copy_(p)
                tmp = tmp * wd
                p.sub_(tmp)
                self.scratch.restore(tmp)

    @torch.no_grad()
    def decay_fused(self, wd):
        for group in self.param_groups:
            for p in group["params"]:
                tmp = self.scratch.lend(p)  # clean: near miss, tmp *= wd stays in the same storage
                tmp.copy_(p)
                tmp *= wd
                p.sub_(tmp)
                self.scratch.restore(tmp)

    def normalized(self, p):
        tmp = self.scratch.lend(p)  # clean: the caller restores it
        tmp.copy_(p)
        tmp.div_(p.norm() + 1e-12)
        return tmp

    def cosine(self, p, q):
        a = self.normalized(p)  # clean: restored below
        b = self.normalized(q)  # clean: restored below
        c = float((a.view(-1) * b.view(-1)).sum())
        self.scratch.restore(a)
        self.scratch.restore(b)
        return c

    def direction(self, p):
        return self.normalized(p).clone()  # leak: the caller gets a clone, the scratch tensor is dropped

    def angle(self, p, q):
        a = self.normalized(p)  # leak: mismatching shapes return before the restore
        if p.shape != q.shape:
            return None
        b = self.normalized(q)  # clean: restored with a
        c = float((a * b).sum().clamp(-1, 1))
        for t in (a, b):
            self.scratch.restore(t)
        return math.acos(c)


def ema_update(scratch, ema, model, decay, in_place=True):
    for e, p in zip(ema, model.parameters()):
        d = scratch.lend(p) if not in_place else None  # clean: near miss, the None test matches the mode
        if in_place:
            e.mul_(decay).add_(p.detach(), alpha=1 - decay)
        else:
            torch.sub(p.detach(), e, out=d)
            e.add_(d, alpha=1 - decay)
        if d is not None:
            scratch.restore(d)


def clip_each(scratch, params, limit):
    clipped = 0
    for p in params:
        tmp = scratch.lend(p)  # leak: restored only when the gradient is above the limit
        torch.abs(p.grad, out=tmp)
        peak = float(tmp.max())
        if peak > limit:
            p.grad.mul_(limit / peak)
            clipped += 1
            scratch.restore(tmp)
    return clipped

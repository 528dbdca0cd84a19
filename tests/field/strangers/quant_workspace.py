"""Dequantisation scratch: views, aliases and reshapes of a pooled tensor."""
import torch
from torch import Tensor


class QuantScratch:
    def __init__(self, device="cpu"):
        self.device = device
        self.parked = {}
        self.loaned = set()

    def loan(self, rows, cols, dtype=torch.float32) -> Tensor:
        stack = self.parked.get((rows, cols, dtype))
        t = stack.pop() if stack else torch.empty(rows, cols, dtype=dtype, device=self.device)
        self.loaned.add(t.data_ptr())
        return t

    def unloan(self, t: Tensor) -> None:
        self.loaned.discard(t.data_ptr())
        self.parked.setdefault((*t.shape, t.dtype), []).append(t)


def dequant(scratch, q, scale):
    buf = scratch.loan(*q.shape)  # clean: near miss, goes through three names and comes back by the last
    work = buf
    work.copy_(q)
    work.mul_(scale)
    result = work.sum(dim=1)
    to_return = work
    scratch.unloan(to_return)
    return result


def dequant_rows(scratch, q, scale, rows):
    buf = scratch.loan(*q.shape)  # leak: out-of-range rows give None back before the unloan
    buf.copy_(q)
    if max(rows) >= q.shape[0]:
        return None
    picked = buf[rows] * scale
    scratch.unloan(buf)
    return picked


def dequant_into(scratch, q, scale, out):
    """Writes to out; works in place there where that is possible."""
    direct = out.dtype == torch.float32
    work = out if direct else scratch.loan(*q.shape)  # clean: near miss, loaned exactly when not direct
    work.copy_(q)
    work.mul_(scale)
    if not direct:
        out.copy_(work)
        scratch.unloan(work)
    return out


def dequant_half(scratch, q, scale):
    buf = scratch.loan(*q.shape)  # leak: converted to half under the same name, the float one is gone
    buf.copy_(q)
    buf.mul_(scale)
    buf = buf.half()
    scratch.unloan(buf)
    return None


def dequant_pair(scratch, a, b, scale):
    x, y = scratch.loan(*a.shape), None  # clean: near miss, unloaned through the loop over both
    y = scratch.loan(*b.shape)  # clean: near miss, unloaned through the loop over both
    try:
        x.copy_(a)
        y.copy_(b)
        return (x.sum() + y.sum()) * scale
    finally:
        for t in (x, y):
            scratch.unloan(t)


def error_of(scratch, q, ref, scale):
    buf = scratch.loan(*q.shape)  # clean: near miss, nested function reads it, outer function unloans it
    buf.copy_(q)

    def worst():
        return float((buf * scale - ref).abs().max())

    value = worst()
    scratch.unloan(buf)
    return value


def calibrate(scratch, q, ref, scales):
    best, best_err = None, float("inf")
    for scale in scales:
        buf = scratch.loan(*q.shape)  # leak: a perfect scale returns from inside the loop
        torch.mul(q, scale, out=buf)
        err = float((buf - ref).abs().max())
        if err == 0.0:
            return scale
        if err < best_err:
            best, best_err = scale, err
        scratch.unloan(buf)
    return best

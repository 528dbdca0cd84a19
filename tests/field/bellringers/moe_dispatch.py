"""Expert dispatch and combine with capacity buffers shared between layers."""
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


class CapacityBuffers:
    """Buffers by capacity; a larger one may be given for a smaller request."""

    def __init__(self, hidden, max_buffers):
        self.hidden = hidden
        self.max_buffers = max_buffers
        self.by_cap = {}
        self.n = 0

    def draw(self, cap):
        for have in sorted(self.by_cap):
            if have >= cap and self.by_cap[have]:
                return self.by_cap[have].pop()
        if self.n >= self.max_buffers:
            return None
        self.n += 1
        return torch.empty(cap, self.hidden, device="cuda", dtype=torch.bfloat16)

    def replace(self, buf):
        self.by_cap.setdefault(buf.shape[0], []).append(buf)

    def draw_zeroed(self, cap):
        buf = self.draw(cap)  # clean: returned to the caller
        return None if buf is None else buf.zero_()

    def draw_exact(self, cap):
        buf = self.draw(cap)  # leak: a larger buffer is not replaced when another is made for the exact size
        if buf is None or buf.shape[0] == cap:
            return buf
        return torch.empty(cap, self.hidden, device="cuda", dtype=torch.bfloat16)


@dataclass
class Dispatched:
    tokens: Any
    counts: Any
    order: Any
    pooled: bool = True


class Dispatcher:
    def __init__(self, bufs, n_experts, group=None):
        self.bufs = bufs
        self.n_experts = n_experts
        self.group = group
        self.open = {}
        self.overflow = 0

    def route(self, x, logits):
        expert = logits.argmax(-1)
        order = expert.argsort()
        counts = torch.bincount(expert, minlength=self.n_experts)
        return order, counts

    def dispatch(self, x, logits):
        """The caller must pass the result to combine()."""
        order, counts = self.route(x, logits)
        buf = self.bufs.draw(x.shape[0])  # clean: returned inside Dispatched, combine() replaces it by the pooled flag
        if buf is None:
            return Dispatched(x[order], counts, order, pooled=False)
        torch.index_select(x, 0, order, out=buf[:x.shape[0]])
        return Dispatched(buf, counts, order)

    def combine(self, d, out):
        n = d.order.numel()
        out[d.order] = d.tokens[:n]
        if d.pooled:
            self.bufs.replace(d.tokens)
        return out

    def layer(self, x, logits, experts):
        d = self.dispatch(x, logits)  # clean: combine() replaces it
        off = 0
        for e, c in zip(experts, d.counts.tolist()):
            if c == 0:
                continue
            d.tokens[off:off + c] = e(d.tokens[off:off + c])
            off += c
        return self.combine(d, torch.empty_like(x))

    def load_of(self, x, logits):
        d = self.dispatch(x, logits)  # leak: only the counts are used, combine() is not called
        return d.counts.float() / x.shape[0]

    def layer_dropping(self, x, logits, experts, cap):
        d = self.dispatch(x, logits)  # leak: not combined when every expert is over its capacity
        kept = [i for i, c in enumerate(d.counts.tolist()) if c <= cap]
        if not kept:
            self.overflow += x.shape[0]
            return x
        off = 0
        for i, c in enumerate(d.counts.tolist()):
            if i in kept and c:
                d.tokens[off:off + c] = experts[i](d.tokens[off:off + c])
            off += c
        return self.combine(d, torch.empty_like(x))

    # two-phase use: begin() in the attention block, end() after the all-to-all

    def begin(self, layer, x, logits):
        if layer in self.open:
            raise RuntimeError(f"layer {layer} is already open")
        self.open[layer] = self.dispatch(x, logits)  # clean: near miss, kept in open, end() and abort() give it back

    def end(self, layer, out):
        return self.combine(self.open.pop(layer), out)

    def abort(self):
        for d in self.open.values():
            if d.pooled:
                self.bufs.replace(d.tokens)
        self.open.clear()

    def exchange(self, d, in_splits, out_splits):
        """Returns a Dispatched with the received tokens and gives d's buffer back."""
        total = sum(out_splits)
        recv = self.bufs.draw(total)  # clean: handed on in the new Dispatched
        pooled = recv is not None
        if not pooled:
            recv = d.tokens.new_empty(total, d.tokens.shape[1])
        dist.all_to_all_single(recv[:total], d.tokens[:sum(in_splits)], out_splits, in_splits, group=self.group)
        if d.pooled:
            self.bufs.replace(d.tokens)
        return Dispatched(recv, d.counts, d.order, pooled=pooled)

    def gather_only(self, x, logits, in_splits, out_splits):
        d = self.dispatch(x, logits)  # clean: exchange() gives its buffer back
        got = self.exchange(d, in_splits, out_splits)  # leak: the received rows are cloned and the buffer dropped
        return got.tokens[:sum(out_splits)].clone()


def shared_expert(bufs, x, up, down, fused):
    tmp = None
    if not fused:
        tmp = bufs.draw_zeroed(x.shape[0])  # clean: near miss, replaced under the same flag if there is one
    if fused:
        out = down(F.silu(up(x)))
    else:
        h = F.silu(up(x))
        out = down(h) if tmp is None else torch.mm(h, down.weight.t(), out=tmp[:x.shape[0]]).clone()
    if not fused and tmp is not None:
        bufs.replace(tmp)
    return out


def per_expert_norms(bufs, experts, x):
    norms = []
    for e in experts:
        tmp = bufs.draw(x.shape[0])  # leak: when one norm is not finite the loop breaks before the replace
        if tmp is None:
            break
        tmp[:x.shape[0]].copy_(e(x))
        n = float(tmp[:x.shape[0]].float().norm())
        if n != n:
            break
        norms.append(n)
        bufs.replace(tmp)
    return norms


def exact_copy(bufs, x):
    tmp = bufs.draw_exact(x.shape[0])  # clean: replaced after the copy
    if tmp is None:
        return x.clone()
    tmp.copy_(x)
    out = tmp.float()
    bufs.replace(tmp)
    return out

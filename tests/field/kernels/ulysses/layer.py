"""Attention layer over an Exchange."""
import torch
import torch.nn.functional as F
from torch import nn


class UlyssesAttention(nn.Module):
    def __init__(self, dim, heads, ex):
        super().__init__()
        self.heads, self.ex = heads, ex
        self.qkv = nn.Linear(dim, 3 * dim)
        self.kept = {}

    def forward(self, x):
        q, k, v = (self.ex.seq_to_head(t) for t in self.qkv(x).chunk(3, dim=-1))
        return self.ex.seq_to_head(F.scaled_dot_product_attention(q, k, v))

    @torch.no_grad()
    def keep_keys(self, layer, k):
        if layer in self.kept:
            self.drop_keys(layer)
        self.kept[layer] = self.ex.swap_detached(k)  # clean: near miss, the earlier one was dropped and drop_keys leaves this one

    def drop_keys(self, layer):
        lane = self.kept.pop(layer, None)
        if lane is not None:
            self.ex.yard.leave(lane)

    @torch.no_grad()
    def attend_once(self, q, k, v):
        kl = self.ex.swap_detached(k)  # clean: left at the end
        vl = self.ex.swap_detached(v)  # leak: rebound to its view, the lane object is lost
        vl = vl.shaped(v.shape)
        out = F.scaled_dot_product_attention(q, kl.shaped(k.shape), vl)
        self.ex.yard.leave(kl)
        return out

    @torch.no_grad()
    def sync_check(self, tags, probe):
        lanes = self.ex.yard.enter_all(tags)  # clean: near miss, None holds nothing and every lane is left
        if lanes is None:
            return False
        good = True
        for lane in lanes:
            lane.shaped(probe.shape).copy_(probe)
            good = good and bool(lane.mem.isfinite().all())
            self.ex.yard.leave(lane)
        return good

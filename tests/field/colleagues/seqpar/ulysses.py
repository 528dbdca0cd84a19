"""All-to-all of heads and sequence over ring segments."""
from __future__ import annotations
import torch
import torch.distributed as dist
from .segments import Loan, SegmentRing
def pack_heads(ring: SegmentRing, x: torch.Tensor, world: int) -> int:
    """Segment that holds x regrouped by destination rank; the caller mends it."""
    i = ring.cut()  # clean: handed to the caller, -1 included
    if i < 0:
        return -1
    y = x.unflatten(1, (world, -1)).transpose(0, 1)
    ring.row(i)[: x.numel()].view(y.shape).copy_(y)
    return i
def scatter_heads(ring: SegmentRing, x: torch.Tensor, group) -> torch.Tensor:
    world = dist.get_world_size(group)
    src = pack_heads(ring, x, world)  # leak: fallback for a full ring forgets src
    dst = ring.cut()  # clean: mended at the end, -1 is no segment
    if src < 0 or dst < 0:
        if dst >= 0:
            ring.mend(dst)
        return fallback(x, group)
    n = x.numel()
    dist.all_to_all_single(ring.row(dst)[:n], ring.row(src)[:n], group=group)
    out = ring.row(dst)[:n].clone()
    ring.mend(dst)
    ring.mend(src)
    return out
def gather_heads(ring: SegmentRing, x: torch.Tensor, group) -> torch.Tensor:
    world = dist.get_world_size(group)
    src = pack_heads(ring, x, world)  # clean: near miss, with body mends on both branches
    with Loan(ring) as dst:  # clean: Loan mends
        if src < 0 or dst < 0:
            if src >= 0:
                ring.mend(src)
            return fallback(x, group)
        n = x.numel()
        dist.all_to_all_single(ring.row(dst)[:n], ring.row(src)[:n], group=group)
        ring.mend(src)
        return ring.row(dst)[:n].clone()
def fallback(x: torch.Tensor, group) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out.flatten()

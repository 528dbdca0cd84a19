# Ring attention for context parallelism, with a small arena for the KV blocks that travel around the ring.
# Functional style: the arena is module state, a block is an (offset, length) pair.
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

_ARENA = None
_HOLES = []          # sorted list of [offset, length]
_LIVE = {}           # offset -> length
_STATS = {"grabs": 0, "drops": 0, "splits": 0}


class ArenaFull(MemoryError):
    pass


class RingBroken(RuntimeError):
    pass


class Block(NamedTuple):
    offset: int
    length: int


def init_arena(numel, device, dtype=torch.bfloat16):
    global _ARENA
    _ARENA = torch.empty(numel, device=device, dtype=dtype)
    _HOLES[:] = [[0, numel]]
    _LIVE.clear()


def grab(numel):
    numel = (numel + 127) // 128 * 128
    for i, (offset, length) in enumerate(_HOLES):
        if length < numel:
            continue
        _HOLES.pop(i)  # clean: the remainder goes back as a hole of its own, the rest to the caller
        if length > numel:
            _HOLES.insert(i, [offset + numel, length - numel])
            _STATS["splits"] += 1
        _LIVE[offset] = numel
        _STATS["grabs"] += 1
        return Block(offset, numel)
    raise ArenaFull(f"no hole of {numel}")


def grab_aligned(numel, align):
    """A block whose offset is a multiple of align."""
    for i, (offset, length) in enumerate(_HOLES):
        start = (offset + align - 1) // align * align
        if start + numel > offset + length:
            continue
        _HOLES.pop(i)  # leak: the gap in front of the aligned start is not put back among the holes
        tail = offset + length - (start + numel)
        if tail:
            _HOLES.insert(i, [start + numel, tail])
        _LIVE[start] = numel
        return Block(start, numel)
    raise ArenaFull(f"no aligned hole of {numel}")


def drop(block):
    length = _LIVE.pop(block.offset)
    _HOLES.append([block.offset, length])
    _HOLES.sort()
    merged = []
    for offset, n in _HOLES:
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1][1] += n
        else:
            merged.append([offset, n])
    _HOLES[:] = merged
    _STATS["drops"] += 1


def tensor_of(block, shape):
    return _ARENA[block.offset: block.offset + math.prod(shape)].view(shape)


def merge_lse(out, lse, o2, l2):
    new = torch.logaddexp(lse, l2)
    return out * (lse - new).exp()[..., None] + o2 * (l2 - new).exp()[..., None], new


def attend(q, kv, scale):
    k, v = kv.unbind(0)
    s = q @ k.transpose(-1, -2) * scale
    lse = s.logsumexp(-1)
    return (s - lse[..., None]).exp() @ v, lse


def ring_exchange(send, recv, group):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ops = [dist.P2POp(dist.isend, send, (rank + 1) % world, group),
           dist.P2POp(dist.irecv, recv, (rank - 1) % world, group)]
    return dist.batch_isend_irecv(ops)


def ring_forward(q, kv, group):
    """Non-causal; two blocks are swapped from hop to hop."""
    world, scale = dist.get_world_size(group), q.shape[-1] ** -0.5
    cur = grab(kv.numel())  # clean: near miss, the names are swapped in the loop but both blocks are dropped at the end
    try:
        nxt = grab(kv.numel())  # clean: when it raises only the first is held, and the handler drops that
    except ArenaFull:
        drop(cur)
        raise
    tensor_of(cur, kv.shape).copy_(kv)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, device=q.device)
    for hop in range(world):
        works = ring_exchange(tensor_of(cur, kv.shape), tensor_of(nxt, kv.shape), group) if hop < world - 1 else []
        out, lse = merge_lse(out, lse, *attend(q, tensor_of(cur, kv.shape), scale))
        for w in works:
            w.wait()
        cur, nxt = nxt, cur
    drop(cur)
    drop(nxt)
    return out, lse


def ring_forward_causal(q, kv, group):
    """Causal; a fresh block for every hop, so that sends may overlap with the next attention."""
    rank, world, scale = dist.get_rank(group), dist.get_world_size(group), q.shape[-1] ** -0.5
    cur = grab(kv.numel())  # clean: near miss, rebound in the loop only after a drop, the last one is dropped at the end
    tensor_of(cur, kv.shape).copy_(kv)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, device=q.device)
    for hop in range(world - 1):
        try:
            nxt = grab(kv.numel())  # leak: on hops whose owner is behind us the loop goes on and the next grab rebinds the name
        except ArenaFull:
            drop(cur)
            raise
        for w in ring_exchange(tensor_of(cur, kv.shape), tensor_of(nxt, kv.shape), group):
            w.wait()
        owner = (rank - hop) % world
        if owner > rank:
            tensor_of(cur, kv.shape).copy_(tensor_of(nxt, kv.shape))
            continue
        out, lse = merge_lse(out, lse, *attend(q, tensor_of(cur, kv.shape), scale))
        drop(cur)
        cur = nxt
    drop(cur)
    return out, lse


def gather_kv(kv, group, check):
    """All blocks at once, for short sequences; answers a list of tensors and a function that frees them."""
    world = dist.get_world_size(group)
    blocks = []
    for _ in range(world):
        try:
            blocks.append(grab(kv.numel()))  # clean: near miss, the handler drops what there is, and otherwise the closure does
        except ArenaFull:
            for b in blocks:
                drop(b)
            return None, None
    parts = [tensor_of(b, kv.shape) for b in blocks]
    dist.all_gather(parts, kv, group=group)
    return parts, partial(_drop_all, blocks)


def _drop_all(blocks):
    while blocks:
        drop(blocks.pop())


def short_attention(q, kv, group):
    parts, free = gather_kv(kv, group, check=True)  # leak: a shape mismatch raises before free() is called
    if parts is None:
        return ring_forward(q, kv, group)
    if any(p.shape[-1] != q.shape[-1] for p in parts):
        raise RingBroken("head size differs between ranks")
    out, lse = attend(q, torch.cat(parts, dim=-2), q.shape[-1] ** -0.5)
    free()
    return out, lse


def make_grad_hook(block, shape, acc):
    def hook(grad):
        tensor_of(block, shape).copy_(grad)
        acc.add_(tensor_of(block, shape))
        drop(block)
        return grad
    return hook


def attach_kv_grads(kv, acc):
    if not kv.requires_grad and acc is None:
        return
    block = grab(kv.numel())  # leak: the hook that drops it is not registered for tensors without grad
    if kv.requires_grad:
        kv.register_hook(make_grad_hook(block, kv.shape, acc))


def balance_zigzag(kv, group):
    """Exchange halves, so that all ranks see the same causal work."""
    half = kv.shape[-2] // 2
    a = grab_aligned(kv.numel() // 2, 1024)  # leak: when the second grab fails the handler falls back and keeps the first
    try:
        b = grab(kv.numel() // 2)  # clean: dropped with its twin after the exchange
    except ArenaFull:
        return kv
    mine, theirs = tensor_of(a, kv[..., half:, :].shape), tensor_of(b, kv[..., half:, :].shape)
    mine.copy_(kv[..., half:, :])
    for w in ring_exchange(mine, theirs, group):
        w.wait()
    out = torch.cat([kv[..., :half, :], theirs], dim=-2)
    drop(a)
    drop(b)
    return out


def run_layers(layers, x, group, limit=2048):
    for layer in layers:
        q, kv = layer.project(x)
        fn = short_attention if kv.shape[-2] * dist.get_world_size(group) <= limit else ring_forward_causal
        out, _ = fn(q, kv, group)
        x = layer.mix(out)
    scratch = grab(x.numel())  # clean: dropped before the return
    y = tensor_of(scratch, x.shape).copy_(x).float().clone()
    drop(scratch)
    return y

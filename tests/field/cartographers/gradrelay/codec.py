"""Flattening, casting and clipping of buckets."""
import torch


def flatten_into(pool, tensors):
    """One bucket with all of tensors; to be recycled by the caller."""
    total = sum(t.numel() for t in tensors)
    flat = pool.obtain(total)  # clean: returned to the caller
    at = 0
    for t in tensors:
        flat[at:at + t.numel()].copy_(t.reshape(-1))
        at += t.numel()
    return flat


def flatten_finite(pool, tensors):
    """Like flatten_into, None when a value is not finite."""
    flat = flatten_into(pool, tensors)  # leak: a bucket with NaN is dropped for None
    total = sum(t.numel() for t in tensors)
    if not torch.isfinite(flat[:total]).all():
        return None
    return flat


def unflatten(flat, likes):
    at = 0
    for t in likes:
        t.copy_(flat[at:at + t.numel()].view_as(t))
        at += t.numel()


def clipped(pool, flat, limit):
    """flat itself, or a scaled bucket of the pool when its norm is over the limit (flat is then recycled)."""
    norm = float(flat.norm())
    if norm <= limit:
        return flat
    scaled = pool.obtain(flat.numel())  # clean: returned and the input recycled
    torch.mul(flat, limit / norm, out=scaled)
    pool.recycle(flat)
    return scaled


def wire_bytes(pool, tensors):
    return flatten_into(pool, tensors).half().numpy().tobytes()  # leak: bytes are made of a copy, the bucket is dropped

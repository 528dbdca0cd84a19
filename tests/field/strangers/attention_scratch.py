"""Scratch tensors for chunked attention."""
import torch


class ScratchPool:
    def __init__(self):
        self._spare = {}

    def get(self, *shape):
        bucket = self._spare.get(shape)
        if bucket:
            return bucket.pop()
        return torch.empty(shape)

    def put(self, tensor):
        self._spare.setdefault(tuple(tensor.shape), []).append(tensor)


scratch = ScratchPool()


def masked_scores(q, k, mask):
    scores = scratch.get(q.shape[0], k.shape[0])  # leak: fully masked rows return early
    torch.matmul(q, k.t(), out=scores)
    if not mask.any():
        return None
    scores.masked_fill_(~mask, float("-inf"))
    probs = scores.softmax(-1)
    scratch.put(scores)
    return probs


def running_max(chunks):
    best = None
    for chunk in chunks:
        tmp = scratch.get(chunk.shape[0], 1)  # clean: near miss, released before every continue and at the end
        torch.amax(chunk, dim=1, keepdim=True, out=tmp)
        if best is None:
            best = tmp.clone()
            scratch.put(tmp)
            continue
        torch.maximum(best, tmp, out=best)
        scratch.put(tmp)
    return best


def accumulate(values, weights):
    out = torch.zeros_like(values[0])
    tmp = None
    for v, w in zip(values, weights):
        tmp = scratch.get(*v.shape)  # leak: rebound each round, only the last is put back
        torch.mul(v, w, out=tmp)
        out += tmp
    if tmp is not None:
        scratch.put(tmp)
    return out


def _projected(x, weight):
    buf = scratch.get(x.shape[0], weight.shape[1])  # clean: handed to the caller
    torch.matmul(x, weight, out=buf)
    return buf


def project_and_norm(x, weight):
    y = _projected(x, weight)  # leak: the caller copies it and drops the original
    return torch.nn.functional.normalize(y, dim=-1).clone()


def project_and_sum(x, weight):
    y = _projected(x, weight)  # clean: near miss, put back in finally after the return value is made
    try:
        return y.sum(-1)
    finally:
        scratch.put(y)

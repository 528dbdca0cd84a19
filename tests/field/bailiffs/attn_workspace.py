"""Scratch tensors for chunked attention and activation saving."""
from __future__ import annotations

import math

import torch


class Workspace:
    """Scratch tensors are kept by shape and lent out again."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._shelf: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.outstanding = 0

    def borrow(self, *shape: int) -> torch.Tensor:
        self.outstanding += 1
        shelf = self._shelf.get(shape)
        if shelf:
            return shelf.pop()
        return torch.empty(shape, device=self.device)

    def restore(self, tensor: torch.Tensor) -> None:
        self.outstanding -= 1
        self._shelf.setdefault(tuple(tensor.shape), []).append(tensor)


def chunked_attention(ws: Workspace, q, k, v, chunk: int, want_lse: bool):
    heads, length, dim = q.shape
    acc = ws.borrow(heads, length, dim)  # clean: restored after the copy
    lse = ws.borrow(heads, length)  # leak: restored only where the caller wants it
    acc.zero_()
    lse.fill_(-math.inf)
    for start in range(0, k.shape[1], chunk):
        scores = q @ k[:, start:start + chunk].transpose(1, 2) / math.sqrt(dim)
        part = torch.logsumexp(scores, dim=-1)
        total = torch.logaddexp(lse, part)
        weight = torch.exp(scores - total.unsqueeze(-1))
        acc.mul_(torch.exp(lse - total).unsqueeze(-1)).add_(weight @ v[:, start:start + chunk])
        lse.copy_(total)
    out = acc.clone()
    ws.restore(acc)
    if want_lse:
        stats = lse.clone()
        ws.restore(lse)
        return out, stats
    return out, None


def windowed_attention(ws: Workspace, q, k, v, window: int, want_lse: bool):
    heads, length, dim = q.shape
    acc = ws.borrow(heads, length, dim)  # clean: restored after the copy
    lse = ws.borrow(heads, length) if want_lse else None  # clean: near miss, borrowed and restored under one test
    for pos in range(length):
        lo = max(0, pos - window + 1)
        scores = (q[:, pos:pos + 1] @ k[:, lo:pos + 1].transpose(1, 2)) / math.sqrt(dim)
        acc[:, pos:pos + 1] = torch.softmax(scores, dim=-1) @ v[:, lo:pos + 1]
        if lse is not None:
            lse[:, pos] = torch.logsumexp(scores, dim=-1)[:, 0]
    out = acc.clone()
    ws.restore(acc)
    if lse is None:
        return out, None
    stats = lse.clone()
    ws.restore(lse)
    return out, stats


def project_qkv(ws: Workspace, x, weights):
    """Fused projection; returns the attention input of one layer."""
    bufs = [ws.borrow(x.shape[0], w.shape[1]) for w in weights]  # leak: three are borrowed, two restored
    for buf, w in zip(bufs, weights):
        torch.matmul(x, w, out=buf)
    q, k, v = bufs
    scores = torch.softmax(q @ k.t() / math.sqrt(q.shape[-1]), dim=-1)
    out = scores @ v
    ws.restore(q)
    ws.restore(k)
    return out


def project_gated(ws: Workspace, x, weights):
    bufs = [ws.borrow(x.shape[0], w.shape[1]) for w in weights]  # clean: near miss, unpacked and all three restored
    for buf, w in zip(bufs, weights):
        torch.matmul(x, w, out=buf)
    up, gate, *extra = bufs
    out = up * torch.sigmoid(gate)
    for t in extra:
        out = out + t
    ws.restore(up)
    ws.restore(gate)
    for t in extra:
        ws.restore(t)
    return out


def power_iterate(ws: Workspace, mat, steps: int):
    ping = ws.borrow(mat.shape[0], 1)  # clean: restored at the end under one of the two names
    pong = ws.borrow(mat.shape[0], 1)  # clean: near miss, the names are swapped but both are restored
    ping.fill_(1.0)
    for _ in range(steps):
        torch.matmul(mat, ping, out=pong)
        pong.div_(pong.norm())
        ping, pong = pong, ping
    value = (ping.t() @ mat @ ping).item()
    ws.restore(ping)
    ws.restore(pong)
    return value


class ActivationSaver:
    """Keeps one activation per layer between forward and backward."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._saved: dict[int, tuple[torch.Tensor, bool]] = {}

    def save(self, layer: int, x: torch.Tensor, trainable: bool) -> None:
        copy = self._ws.borrow(*x.shape)  # leak: backward pops every layer and restores the trainable ones only
        copy.copy_(x)
        self._saved[layer] = (copy, trainable)

    def backward(self, layer: int, grad: torch.Tensor) -> torch.Tensor:
        copy, trainable = self._saved.pop(layer)
        if not trainable:
            return grad
        result = grad * (copy > 0)
        self._ws.restore(copy)
        return result


class ResidualSaver:
    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._saved: dict[int, tuple[torch.Tensor, bool]] = {}

    def save(self, layer: int, x: torch.Tensor, trainable: bool) -> None:
        copy = self._ws.borrow(*x.shape)  # clean: near miss, backward restores before it looks at the flag
        copy.copy_(x)
        self._saved[layer] = (copy, trainable)

    def backward(self, layer: int, grad: torch.Tensor) -> torch.Tensor:
        copy, trainable = self._saved.pop(layer)
        active = copy > 0
        self._ws.restore(copy)
        if not trainable:
            return grad
        return grad * active


def microbatch_norms(ws: Workspace, batches, dim: int) -> list[float]:
    scratch = [ws.borrow(dim) for _ in batches]  # leak: the batches with a zero norm do not restore theirs
    norms: list[float] = []
    for buf, batch in zip(scratch, batches):
        torch.sum(batch, dim=0, out=buf)
        norm = buf.norm().item()
        if norm == 0.0:
            continue
        norms.append(norm)
        ws.restore(buf)
    return norms

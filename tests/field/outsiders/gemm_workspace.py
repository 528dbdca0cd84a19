# Quantised GEMM helpers. Function style, one module level pool.
import threading
from typing import Optional

import torch

_LOCK = threading.Lock()
_IDLE: list = []
_OUT: set = set()
WORKSPACE_BYTES = 32 * 1024 * 1024


def acquire_workspace(nbytes: int = WORKSPACE_BYTES) -> torch.Tensor:
    with _LOCK:
        for i, t in enumerate(_IDLE):
            if t.numel() >= nbytes:
                _IDLE.pop(i)
                _OUT.add(id(t))
                return t
    t = torch.empty(nbytes, dtype=torch.uint8)
    with _LOCK:
        _OUT.add(id(t))
    return t


def release_workspace(t: torch.Tensor) -> None:
    with _LOCK:
        _OUT.discard(id(t))
        _IDLE.append(t)


def _carve(ws: torch.Tensor, shape, dtype, offset=0):
    n = 1
    for s in shape:
        n *= s
    size = n * torch.empty((), dtype=dtype).element_size()
    return ws[offset:offset + size].view(dtype).view(*shape)


def int8_gemm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    ws = acquire_workspace()  # clean: released before the return, the result is new
    acc = _carve(ws, (a.shape[0], b.shape[1]), torch.float32)
    torch.matmul(a.float(), b.float(), out=acc)
    out = acc * scale
    release_workspace(ws)
    return out


def int8_gemm_bias(a, b, scale, bias: Optional[torch.Tensor] = None):
    ws = acquire_workspace()  # leak: the branch without a bias returns the product directly
    acc = _carve(ws, (a.shape[0], b.shape[1]), torch.float32)
    torch.matmul(a.float(), b.float(), out=acc)
    if bias is None:
        return acc * scale
    out = torch.addcmul(bias, acc, torch.tensor(scale))
    release_workspace(ws)
    return out


def int8_gemm_post_bias(a, b, scale, bias=None):
    ws = acquire_workspace()  # clean: near miss, released between the use and the branch
    acc = _carve(ws, (a.shape[0], b.shape[1]), torch.float32)
    torch.matmul(a.float(), b.float(), out=acc)
    out = acc * scale
    release_workspace(ws)
    if bias is None:
        return out
    return out + bias


def split_k(a, b, parts: int):
    ws = acquire_workspace()  # clean: released after the partial sums are added up
    k = a.shape[1]
    step = (k + parts - 1) // parts
    partial = _carve(ws, (parts, a.shape[0], b.shape[1]), torch.float32)
    partial.zero_()
    for i in range(parts):
        lo = i * step
        if lo >= k:
            break
        torch.matmul(a[:, lo:lo + step], b[lo:lo + step], out=partial[i])
    out = partial.sum(0)
    release_workspace(ws)
    return out


def split_k_checked(a, b, parts: int):
    ws = acquire_workspace()  # leak: too many parts raise ValueError while it is held
    need = parts * a.shape[0] * b.shape[1] * 4
    if need > ws.numel():
        raise ValueError("split-k workspace too small: %d" % need)
    partial = _carve(ws, (parts, a.shape[0], b.shape[1]), torch.float32)
    torch.matmul(a.expand(parts, -1, -1), b.expand(parts, -1, -1), out=partial)
    out = partial.mean(0)
    release_workspace(ws)
    return out


def grouped_gemm(xs, w, workspace: Optional[torch.Tensor] = None):
    own = workspace is None
    if own:
        workspace = acquire_workspace()  # clean: near miss, own remembers who has to release
    outs = []
    for x in xs:
        buf = _carve(workspace, (x.shape[0], w.shape[1]), torch.float32)
        torch.matmul(x, w, out=buf)
        outs.append(buf.clone())
    if own:
        release_workspace(workspace)
    return outs


def grouped_gemm_cat(xs, w, workspace: Optional[torch.Tensor] = None):
    if workspace is None:
        workspace = acquire_workspace()  # leak: the one taken here is treated like the caller's and never released
    outs = []
    for x in xs:
        buf = _carve(workspace, (x.shape[0], w.shape[1]), torch.float32)
        torch.matmul(x, w, out=buf)
        outs.append(buf.clone())
    return torch.cat(outs)


def autotune(a, b, candidates):
    best, best_parts = None, None
    for parts in candidates:
        ws = acquire_workspace()  # leak: candidates that do not divide k are skipped with the workspace in hand
        if a.shape[1] % parts:
            continue
        out = split_k(a, b, parts)
        err = (out - a @ b).abs().max().item()
        if best is None or err < best:
            best, best_parts = err, parts
        release_workspace(ws)
    return best_parts


def autotune_shared(a, b, candidates):
    ws = acquire_workspace()  # clean: near miss, continue stays inside the loop and the release follows it
    scores = {}
    for parts in candidates:
        if a.shape[1] % parts:
            continue
        ws.zero_()
        scores[parts] = split_k(a, b, parts).norm().item()
    release_workspace(ws)
    return min(scores, key=scores.get) if scores else None


def preallocate(n: int) -> None:
    for ws in [acquire_workspace() for _ in range(n)]:  # clean: each is released, which fills the idle list
        release_workspace(ws)


def dequant(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    ws = acquire_workspace()  # leak: after the rebinding the release gets a view's product, not the workspace
    ws = _carve(ws, q.shape, torch.float32) * scales
    out = ws + q.float() * scales
    release_workspace(ws)
    return out

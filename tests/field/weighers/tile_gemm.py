"""Out-of-core matrix products and a small tuner; tiles come from one arena of device tensors."""
import time
from functools import partial

import torch


class TileArena:
    def __init__(self, device):
        self.device = device
        self._tiles = {}

    def cut(self, m, n, dtype):
        pile = self._tiles.setdefault((m, n, dtype), [])
        return pile.pop() if pile else torch.empty(m, n, dtype=dtype, device=self.device)

    def shelve(self, tile):
        self._tiles.setdefault((*tile.shape, tile.dtype), []).append(tile)


def dequantize(arena, codes, scales, group, dtype):
    """int8 codes [m, k] with a scale for each `group` columns, as a tile that the caller shelves."""
    m, k = codes.shape
    tile = arena.cut(m, k, dtype)  # clean: handed to the caller
    tile.copy_(codes)
    tile.view(m, k // group, group).mul_(scales.to(dtype).unsqueeze(-1))
    return tile


def load_rows(arena, host, lo, hi):
    """Rows of a host matrix as a tile; None where the range is empty."""
    if lo >= hi:
        return None
    tile = arena.cut(hi - lo, host.shape[1], host.dtype)  # clean: handed to the caller
    tile.copy_(host[lo:hi], non_blocking=True)
    return tile


def gemm_host(arena, a, b, rows, bias=None, out=None, activation=None):
    """a [M, K] on the host times b [K, N] on the device, `rows` rows at a time, loads one step ahead."""
    total, n = a.shape[0], b.shape[1]
    out = torch.empty(total, n, dtype=a.dtype) if out is None else out
    wide = None
    if bias is not None:
        wide = arena.cut(1, n, torch.float32)  # clean: near miss, shelved under the same condition
        wide[0].copy_(bias)
    tile = load_rows(arena, a, 0, min(rows, total))  # clean: near miss, shelved each turn; None when there are no rows
    at = 0
    while tile is not None:
        stop = at + tile.shape[0]
        ahead = load_rows(arena, a, stop, min(stop + rows, total))  # clean: near miss, becomes the tile
        acc = arena.cut(tile.shape[0], n, torch.float32)  # clean: near miss, shelved after the copy to the host
        torch.mm(tile.float(), b.float(), out=acc)
        if wide is not None:
            acc.add_(wide)
        match activation:
            case None:
                pass
            case "relu":
                acc.relu_()
            case "gelu":
                acc.copy_(torch.nn.functional.gelu(acc))
            case "softcap":
                acc.div_(30.0).tanh_().mul_(30.0)
            case other:
                acc.copy_(other(acc))
        out[at:stop].copy_(acc)
        arena.shelve(acc)
        arena.shelve(tile)
        tile, at = ahead, stop
    if wide is not None:
        arena.shelve(wide)
    return out


def gemm_quantized(arena, x, codes, scales, group, block, out_dtype=None, check=False):
    """x [M, K] times the transpose of a quantised weight [N, K], `block` weight rows at a time."""
    n, k = codes.shape
    m = x.shape[0]
    dtype = x.dtype
    result = torch.empty(m, n, dtype=out_dtype or dtype, device=x.device)
    panel = arena.cut(m, block, torch.float32)  # leak: a failed check returns before the panel is shelved
    full = n - n % block
    for lo in range(0, full, block):
        weight = dequantize(arena, codes[lo:lo + block], scales[lo:lo + block], group, dtype)  # clean: shelved below
        torch.mm(x.float(), weight.t().float(), out=panel)
        if check and not torch.isfinite(panel).all():
            arena.shelve(weight)
            return None
        result[:, lo:lo + block].copy_(panel)
        arena.shelve(weight)
    if full < n:
        weight = dequantize(arena, codes[full:], scales[full:], group, dtype).t()  # clean: near miss, weight.t() shelved
        last = torch.mm(x.float(), weight.float())
        result[:, full:].copy_(last)
        arena.shelve(weight.t())
    if check:
        sample = dequantize(arena, codes[:1], scales[:1], group, dtype)  # leak: compared once and dropped
        exact = torch.mv(x.float(), sample[0].float())
        drift = (exact - result[:, 0].float()).abs().max().item()
        if drift > 0.1 * exact.abs().max().item():
            result[:, 0].copy_(exact)
    arena.shelve(panel)
    return result


def tune(arena, candidates, a, b, repeats=3, tolerance=1e-2):
    """Run each candidate into a tile of its own; the fastest one that is right and a copy of its result."""
    m, n = a.shape[0], b.shape[1]
    reference = arena.cut(m, n, torch.float32)  # clean: shelved before the return
    torch.mm(a.float(), b.float(), out=reference)
    best_name, best_time, best_tile = None, float("inf"), None
    report = {}
    for name, kernel in candidates.items():
        trial = arena.cut(m, n, torch.float32)  # leak: a former best is overwritten by a faster one
        call = partial(kernel, a, b, trial)
        if not call():
            report[name] = None
            arena.shelve(trial)
            continue
        error = (trial - reference).abs().max().item()
        if error > tolerance * reference.abs().max().item():
            report[name] = float("nan")
            arena.shelve(trial)
            continue
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        report[name] = (time.perf_counter() - begin) / repeats
        if report[name] < best_time:
            best_name, best_time, best_tile = name, report[name], trial
        else:
            arena.shelve(trial)
    arena.shelve(reference)
    if best_tile is None:
        return None, None, report
    value = best_tile.clone()
    arena.shelve(best_tile)
    return best_name, value, report


def power_norm(arena, a, steps, seed=0):
    """Largest singular value by power iteration, two vectors in turn for each side."""
    gen = torch.Generator(device=arena.device).manual_seed(seed)
    x = arena.cut(a.shape[1], 1, torch.float32)  # clean: near miss, x and nxt swap, both shelved
    nxt = arena.cut(a.shape[1], 1, torch.float32)  # clean: near miss, x and nxt swap, both shelved
    y = arena.cut(a.shape[0], 1, torch.float32)  # leak: an all-zero product returns with y out, x and nxt shelved
    x.normal_(generator=gen)
    x.div_(x.norm())
    value = 0.0
    for _ in range(steps):
        torch.mm(a, x, out=y)
        torch.mm(a.t(), y, out=nxt)
        size = nxt.norm().item()
        if size == 0.0:
            for tile in (x, nxt):
                arena.shelve(tile)
            return 0.0
        nxt.div_(size)
        value = size ** 0.5
        x, nxt = nxt, x
    for tile in (x, nxt, y):
        arena.shelve(tile)
    return value

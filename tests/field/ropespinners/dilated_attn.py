"""Dilated attention (segments x dilation rates). Scratch comes from module-level free lists, one list for each row width."""
import heapq
import threading
from typing import Callable, Dict, Generator, Iterable, List, Optional, Tuple

import torch

MAX_ROWS = 1 << 17

_guard = threading.Lock()
_free: Dict[int, List[Tuple[int, int, torch.Tensor]]] = {}
_rows_live = 0
_tick = 0


def grab_scratch(rows: int, width: int) -> Optional[torch.Tensor]:
    """A (>= rows, width) scratch tensor; the smallest that fits. None when the row budget is spent."""
    global _rows_live
    with _guard:
        heap = _free.setdefault(width, [])
        spare = []
        found = None
        while heap:
            item = heapq.heappop(heap)  # clean: near miss, too-small ones go to spare and are pushed again
            if item[0] >= rows:
                found = item[2]
                break
            spare.append(item)
        for item in spare:
            heapq.heappush(heap, item)
        if found is not None:
            return found
        if _rows_live + rows > MAX_ROWS:
            return None
        _rows_live += rows
    return torch.empty(rows, width, device="cuda")


def drop_scratch(t: torch.Tensor) -> None:
    global _tick
    with _guard:
        _tick += 1
        heapq.heappush(_free.setdefault(t.shape[1], []), (t.shape[0], _tick, t))


def must_grab(rows: int, width: int) -> torch.Tensor:
    """Goes over the row budget when there is no other way."""
    global _rows_live
    t = grab_scratch(rows, width)  # clean: returned to the caller
    if t is None:
        with _guard:
            _rows_live += rows
        t = torch.empty(rows, width, device="cuda")
    return t


def trim(width: int, keep_rows: int) -> int:
    """Gives memory of small scratch back to the allocator."""
    global _rows_live
    freed = 0
    with _guard:
        heap = _free.get(width, [])
        while heap and heap[0][0] < keep_rows:
            rows, _, t = heapq.heappop(heap)  # clean: near miss, retired on purpose and the row budget is lowered
            _rows_live -= rows
            freed += rows
            del t
    return freed


def take_one_for(width: int, ok: Callable[[torch.Tensor], bool]) -> Optional[torch.Tensor]:
    """A spare that satisfies ok (alignment, for instance)."""
    with _guard:
        heap = _free.get(width, [])
        for _ in range(len(heap)):
            _, _, t = heapq.heappop(heap)  # leak: a spare that fails ok() is neither pushed again nor returned
            if ok(t):
                return t
    return None


def dilate(x: torch.Tensor, segment: int, rate: int, offset: int) -> torch.Tensor:
    n, d = x.shape
    picks = [i for s in range(0, n, segment) for i in range(s + offset, min(s + segment, n), rate)]
    out = must_grab(len(picks), d)  # clean: returned to the caller
    torch.index_select(x, 0, torch.tensor(picks, device=x.device), out=out[: len(picks)])
    return out


def scatter_back(dst: torch.Tensor, src: torch.Tensor, segment: int, rate: int, offset: int) -> None:
    n = dst.shape[0]
    row = 0
    for s in range(0, n, segment):
        idx = torch.arange(s + offset, min(s + segment, n), rate, device=dst.device)
        dst[idx] = src[row: row + idx.numel()]
        row += idx.numel()


def branch(q, k, v, segment: int, rate: int, attn: Callable) -> torch.Tensor:
    """One (segment, rate) branch; heads share an offset here."""
    dq = dilate(q, segment, rate, 0)  # clean: dropped below
    dk = dilate(k, segment, rate, 0)  # clean: dropped below
    dv = dilate(v, segment, rate, 0)  # clean: dropped below
    res = torch.zeros_like(q)
    scatter_back(res, attn(dq, dk, dv), segment, rate, 0)
    for t in (dq, dk, dv):
        drop_scratch(t)
    return res


def mix(branches: Iterable[Tuple[torch.Tensor, torch.Tensor]], width: int, rows: int) -> torch.Tensor:
    num = must_grab(rows, width)  # clean: dropped after the division
    den = must_grab(rows, 1)  # leak: only num is dropped
    num[:rows].zero_()
    den[:rows].zero_()
    for out, lse in branches:
        w = lse.exp().unsqueeze(-1)
        num[:rows].add_(out * w)
        den[:rows].add_(w)
    res = num[:rows] / den[:rows].clamp_min(1e-6)
    drop_scratch(num)
    return res


def key_norms(k: torch.Tensor, segment: int, rate: int) -> torch.Tensor:
    total = torch.zeros((), device=k.device)
    for off in range(rate):
        total += dilate(k, segment, rate, off).norm()  # leak: reduced in place, the scratch is never dropped
    return total


def sink_rows(x: torch.Tensor, n_sink: int) -> torch.Tensor:
    """Rows that every query sees; few, so always gathered."""
    buf = must_grab(n_sink, x.shape[1])  # clean: returned to the caller
    buf[:n_sink].copy_(x[:n_sink])
    return buf


def segments(x: torch.Tensor, segment: int) -> Generator[torch.Tensor, None, None]:
    """Padded segments, each valid until the next one is asked for."""
    pad = must_grab(segment, x.shape[1])  # clean: dropped in finally when the generator ends or is closed
    try:
        for s in range(0, x.shape[0], segment):
            part = x[s: s + segment]
            if part.shape[0] == segment:
                yield part
                continue
            pad[: part.shape[0]].copy_(part)
            pad[part.shape[0]: segment].zero_()
            yield pad[:segment]
    finally:
        drop_scratch(pad)


def dilated_rows(x: torch.Tensor, plan: List[Tuple[int, int]]) -> Generator[torch.Tensor, None, None]:
    for segment, rate in plan:
        t = dilate(x, segment, rate, 0)  # clean: near miss, the consumer of the generator owns what is yielded
        yield t


def pooled_means(x: torch.Tensor, plan: List[Tuple[int, int]]) -> List[torch.Tensor]:
    means = []
    for t in dilated_rows(x, plan):  # clean: each one dropped in the loop
        means.append(t.mean(0))
        drop_scratch(t)
    return means


def longest_branch(x: torch.Tensor, plan: List[Tuple[int, int]], limit: int) -> Optional[torch.Tensor]:
    best = None
    for t in dilated_rows(x, plan):  # leak: a better t rebinds best without dropping the one before
        if t.shape[0] > limit:
            drop_scratch(t)
            continue
        if best is None or t.shape[0] > best.shape[0]:
            best = t
        else:
            drop_scratch(t)
    return best


def with_sinks(q, k, v, n_sink: int, attn: Callable, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    use_sink = n_sink > 0
    ks = vs = None
    if use_sink:
        ks = sink_rows(k, n_sink)  # clean: near miss, dropped under the same use_sink
        vs = sink_rows(v, n_sink)  # clean: near miss, dropped under the same use_sink
        k = torch.cat([ks[:n_sink], k])
        v = torch.cat([vs[:n_sink], v])
    res = attn(q, k, v)
    if use_sink:
        drop_scratch(ks)
        drop_scratch(vs)
    if out is not None:
        out.copy_(res)
        return out
    return res


def cross_segment(q, k, segment: int, score: Callable) -> List[float]:
    marks: List[float] = []
    for seg in segments(q, segment):  # clean: the generator runs to its end
        head = must_grab(segment, k.shape[1])  # leak: a segment longer than the keys leaves the loop body by continue
        if seg.shape[0] > k.shape[0]:
            continue
        head[: seg.shape[0]].copy_(k[: seg.shape[0]])
        marks.append(float(score(seg, head[: seg.shape[0]])))
        drop_scratch(head)
    return marks

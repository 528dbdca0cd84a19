"""Weight loading through pinned slabs. Module-level state; call reap() now and then."""
import math
import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch

LIMIT = 4 << 30
WINDOW = 4


class StagingFull(RuntimeError):
    pass


class Slab(NamedTuple):
    size_class: int
    data: torch.Tensor


_LOCK = threading.Lock()
_BUCKETS: Dict[int, List[Slab]] = defaultdict(list)
_PENDING: List[Tuple[torch.cuda.Event, Slab]] = []
_AHEAD: Dict[str, List[Tuple[str, Slab]]] = {}
_total = 0


def _size_class(nbytes: int) -> int:
    return max(16, math.ceil(math.log2(max(nbytes, 1))))


def borrow(nbytes: int) -> Slab:
    """A slab of at least nbytes; raises StagingFull when the limit is reached."""
    global _total
    cls = _size_class(nbytes)
    with _LOCK:
        for c in range(cls, cls + 3):
            if _BUCKETS[c]:
                return _BUCKETS[c].pop()  # clean: returned to the caller
        if _total + (1 << cls) > LIMIT:
            raise StagingFull(f"{_total} bytes pinned, {1 << cls} more wanted")
        _total += 1 << cls
    return Slab(cls, torch.empty(1 << cls, dtype=torch.uint8, pin_memory=True))  # clean: returned to the caller


def give_back(slab: Slab) -> None:
    with _LOCK:
        _BUCKETS[slab.size_class].append(slab)


@contextmanager
def lent(nbytes: int) -> Iterator[torch.Tensor]:
    slab = borrow(nbytes)  # clean: given back by the finally
    try:
        yield slab.data[:nbytes]
    finally:
        give_back(slab)


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8).reshape(-1)


def stage(t: torch.Tensor) -> Slab:
    raw = _bytes_of(t)
    slab = borrow(raw.numel())  # clean: returned to the caller, filled
    slab.data[: raw.numel()].copy_(raw)
    return slab


def reap(block: bool = False) -> int:
    """Give back the slabs whose copies have ended."""
    done = 0
    rest = []
    for event, slab in _PENDING:
        if block:
            event.synchronize()
        if block or event.query():
            give_back(slab)
            done += 1
        else:
            rest.append((event, slab))
    _PENDING[:] = rest
    return done


def upload_async(t: torch.Tensor, dst: torch.Tensor, stream: "torch.cuda.Stream") -> None:
    slab = stage(t)  # clean: near miss, waits in _PENDING with its event and reap() gives it back
    event = torch.cuda.Event()
    with torch.cuda.stream(stream):
        _bytes_of(dst).copy_(slab.data[: dst.nbytes], non_blocking=True)
        event.record(stream)
    _PENDING.append((event, slab))


def upload_pair(gate: torch.Tensor, up: torch.Tensor, dst: torch.Tensor) -> None:
    """The two halves of a fused gate_up projection."""
    first = stage(gate)  # leak: when the second stage() raises StagingFull the first slab is lost
    second = stage(up)  # clean: given back by the finally
    try:
        half = dst.shape[0] // 2
        _bytes_of(dst[:half]).copy_(first.data[: gate.nbytes])
        _bytes_of(dst[half:]).copy_(second.data[: up.nbytes])
    finally:
        give_back(first)
        give_back(second)


def iter_staged(shard: Dict[str, torch.Tensor]) -> Iterator[Tuple[str, Slab]]:
    for name in sorted(shard):
        slab = stage(shard[name])  # leak: load_until() breaks out of the loop and the generator never gets past the yield
        yield name, slab
        give_back(slab)


def iter_window(shard: Dict[str, torch.Tensor]) -> Iterator[Tuple[str, Slab]]:
    window: deque = deque()
    try:
        for name in sorted(shard):
            window.append((name, stage(shard[name])))  # clean: near miss, given back after its yield or by the finally
            if len(window) == WINDOW:
                yield window[0]
                give_back(window.popleft()[1])
        while window:
            yield window[0]
            give_back(window.popleft()[1])
    finally:
        for _, slab in window:
            give_back(slab)


def load_until(shard: Dict[str, torch.Tensor], params: Dict[str, torch.Tensor], last: str) -> int:
    loaded = 0
    for name, slab in iter_staged(shard):
        dst = params.get(name)
        if dst is not None:
            _bytes_of(dst).copy_(slab.data[: dst.nbytes])
            loaded += 1
        if name == last:
            break
    return loaded


def load_windowed(shard: Dict[str, torch.Tensor], params: Dict[str, torch.Tensor]) -> int:
    loaded = 0
    for name, slab in iter_window(shard):
        if name not in params:
            continue
        _bytes_of(params[name]).copy_(slab.data[: params[name].nbytes])
        loaded += 1
    return loaded


def convert(t: torch.Tensor, dtype: torch.dtype, device: str, scale: Optional[float] = None) -> torch.Tensor:
    slab: Optional[Slab] = None
    if t.dtype != dtype:
        slab = borrow(t.numel() * dtype.itemsize)  # leak: a cast with a scale is skipped by the guard below, which asks for more than this one
        work = slab.data[: t.numel() * dtype.itemsize].view(dtype).reshape(t.shape)
        work.copy_(t)
    else:
        work = t
    out = work.to(device)
    if scale is not None:
        out = out * scale
    if t.dtype != dtype and scale is None:
        give_back(slab)
    return out


def merged_bias(parts: List[Optional[torch.Tensor]], width: int, device: str) -> Optional[torch.Tensor]:
    slab = borrow(4 * width * len(parts))  # leak: no bias at all returns early
    host = slab.data[: 4 * width * len(parts)].view(torch.float32).reshape(len(parts), width)
    host.zero_()
    present = [i for i, p in enumerate(parts) if p is not None]
    if not present:
        return None
    for i in present:
        host[i].copy_(parts[i])
    out = host.to(device)
    give_back(slab)
    return out


def prefetch(path: str, shard: Dict[str, torch.Tensor], names: Iterable[str]) -> int:
    entry = _AHEAD.setdefault(path, [])
    for name in names:
        try:
            entry.append((name, stage(shard[name])))  # leak: forget() drops the entry of a path without giving back
        except StagingFull:
            break
    return len(entry)


def consume(path: str, params: Dict[str, torch.Tensor]) -> int:
    entry = _AHEAD.pop(path, [])
    for name, slab in entry:
        if name in params:
            _bytes_of(params[name]).copy_(slab.data[: params[name].nbytes])
        give_back(slab)
    return len(entry)


def forget(path: str) -> None:
    if _AHEAD.pop(path, None) is not None:
        print(f"dropped read-ahead of {path}")


def quantise_rows(w: torch.Tensor, bits: int = 8) -> Tuple[torch.Tensor, torch.Tensor]:
    qmax = 2 ** (bits - 1) - 1
    scratch = borrow(w.numel())  # clean: the early return is inside the try and the finally gives it back
    try:
        scales = w.abs().amax(dim=1).clamp(min=1e-8) / qmax
        q = scratch.data[: w.numel()].view(torch.int8).reshape(w.shape)
        q.copy_((w / scales[:, None]).round())
        if bits == 8:
            return q.clone(), scales
        return q.clone().clamp_(-qmax, qmax), scales
    finally:
        give_back(scratch)


def checksum(t: torch.Tensor) -> int:
    with lent(t.nbytes) as host:  # clean: the context manager gives back
        host.copy_(_bytes_of(t))
        return int(host.sum(dtype=torch.int64))

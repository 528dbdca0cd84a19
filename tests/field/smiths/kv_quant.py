"""Quantised KV pages: one arena for packed int4 data, one for the scales that go with it."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple


class PageArena:
    def __init__(self, name: str, num_pages: int) -> None:
        self.name = name
        self._free: List[int] = list(range(num_pages - 1, -1, -1))
        self._used: set = set()
        self.bytes: Dict[int, bytes] = {}

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        page = self._free.pop()
        self._used.add(page)
        return page

    def free(self, page: int) -> None:
        self._used.remove(page)
        self.bytes.pop(page, None)
        self._free.append(page)

    def alloc_many(self, n: int) -> Optional[List[int]]:
        pages: List[int] = []
        for _ in range(n):
            page = self.alloc()  # clean: freed again when the arena runs dry, else returned in the list
            if page is None:
                self.free_many(pages)
                return None
            pages.append(page)
        return pages

    def free_many(self, pages: List[int]) -> None:
        for page in pages:
            self.free(page)

    @property
    def used(self) -> int:
        return len(self._used)


@dataclass
class SeqPages:
    seq_id: int
    data: List[int] = field(default_factory=list)
    scales: List[int] = field(default_factory=list)
    outlier: Optional[int] = None


class QuantKV:
    def __init__(self, data: PageArena, scale: PageArena) -> None:
        self.data = data
        self.scale = scale
        self.seqs: Dict[int, SeqPages] = {}

    def seq(self, seq_id: int) -> SeqPages:
        return self.seqs.setdefault(seq_id, SeqPages(seq_id))

    def append_page(self, seq: SeqPages) -> bool:
        d = self.data.alloc()  # leak: no scale page left, the data page is not rolled back
        if d is None:
            return False
        s = self.scale.alloc()  # clean: moves into the sequence
        if s is None:
            return False
        seq.data.append(d)
        seq.scales.append(s)
        return True

    def append_pair(self, seq: SeqPages) -> bool:
        d = self.data.alloc()  # clean: rolled back, or moves into the sequence
        s = self.scale.alloc()  # clean: near miss, rolled back under its own None check
        if d is None or s is None:
            if d is not None:
                self.data.free(d)
            if s is not None:
                self.scale.free(s)
            return False
        seq.data.append(d)
        seq.scales.append(s)
        return True

    def append_span(self, seq: SeqPages, n: int) -> bool:
        pages = self.data.alloc_many(n)  # clean: freed when the scales fail, else extends the sequence
        if pages is None:
            return False
        scales = self.scale.alloc_many(n)  # clean: near miss, the failing way has none
        if not scales:
            self.data.free_many(pages)
            return False
        seq.data.extend(pages)
        seq.scales.extend(scales)
        return True

    def quantise(self, page: int, values: List[float]) -> bytes:
        amax = max((abs(v) for v in values), default=0.0)
        if amax > 1e4:
            raise OverflowError(f"page {page}: amax {amax}")
        packed = bytes(int(7 * v / amax) & 0xF if amax else 0 for v in values)
        self.data.bytes[page] = packed
        return packed

    def requantise(self, seq: SeqPages, idx: int, values: List[float]) -> bool:
        new = self.data.alloc()  # clean: near miss, freed in the handler, else swapped in and the old page freed
        if new is None:
            return False
        try:
            self.quantise(new, values)
        except OverflowError:
            self.data.free(new)
            return False
        old, seq.data[idx] = seq.data[idx], new
        self.data.free(old)
        return True

    def keep_outliers(self, seq: SeqPages, values: List[float]) -> bool:
        page = self.data.alloc()  # leak: the caught overflow returns with the page neither stored nor freed
        if page is None:
            return False
        try:
            self.quantise(page, values)
        except OverflowError:
            return False
        if seq.outlier is not None:
            self.data.free(seq.outlier)
        seq.outlier = page
        return True

    def probe_error(self, values: List[float]) -> Optional[int]:
        page = self.data.alloc()  # leak: page number 0 is falsy and taken for a failed allocation
        if not page:
            return None
        packed = self.quantise(page, values)
        err = sum(1 for b in packed if b == 0)
        self.data.free(page)
        return err

    def roundtrip(self, values: List[float]) -> Optional[bytes]:
        if (page := self.data.alloc()) is None:  # clean: freed in finally
            return None
        try:
            return self.quantise(page, values)
        finally:
            self.data.free(page)

    def release_seq(self, seq_id: int) -> None:
        seq = self.seqs.pop(seq_id, None)
        if seq is None:
            return
        self.data.free_many(seq.data)
        self.scale.free_many(seq.scales)
        if seq.outlier is not None:
            self.data.free(seq.outlier)


class SlidingWindow:
    """Pages of the last `width` steps for local-attention layers."""

    def __init__(self, arena: PageArena, width: int) -> None:
        self.arena = arena
        self.width = width
        self.pages: List[int] = []

    def step(self) -> bool:
        page = self.arena.alloc()  # clean: near miss, pages pushed out of the window are freed
        if page is None:
            return False
        self.pages.append(page)
        while len(self.pages) > self.width:
            self.arena.free(self.pages.pop(0))
        return True

    def close(self) -> None:
        self.arena.free_many(self.pages)
        self.pages = []


class SinkWindow:
    """Attention-sink layers: the first pages stay, the tail rolls."""

    def __init__(self, arena: PageArena, sinks: int, width: int) -> None:
        self.arena = arena
        self.sink = arena.alloc_many(sinks)  # clean: freed in close
        self.tail: Deque[int] = deque(maxlen=width)

    def step(self) -> bool:
        page = self.arena.alloc()  # leak: the full deque drops its oldest page on append
        if page is None:
            return False
        self.tail.append(page)
        return True

    def close(self) -> None:
        while self.tail:
            self.arena.free(self.tail.popleft())
        if self.sink:
            self.arena.free_many(self.sink)
            self.sink = None


def dequant_rows(kv: QuantKV, rows: List[List[float]]) -> Tuple[int, int]:
    ok = bad = 0
    for values in rows:
        page = kv.data.alloc()  # leak: empty rows continue with the page in hand
        if page is None:
            break
        if not values:
            bad += 1
            continue
        kv.quantise(page, values)
        ok += 1
        kv.data.free(page)
    return ok, bad


def main() -> None:
    kv = QuantKV(PageArena("data", 16), PageArena("scale", 6))
    seq = kv.seq(1)
    assert kv.append_pair(seq) and kv.append_span(seq, 2)
    assert kv.requantise(seq, 0, [1.0, -2.0]) and not kv.requantise(seq, 1, [1e6])
    print(kv.roundtrip([0.5, 0.25]))
    win = SlidingWindow(kv.data, 3)
    for _ in range(5):
        win.step()
    win.close()
    kv.release_seq(1)
    print("used:", kv.data.used, kv.scale.used)


if __name__ == "__main__":
    main()

"""Which rows and heads of a chunk one kernel call covers: the tiles of a dilated branch.

A branch of segment length w and dilation r lets head j attend, inside every segment, among the rows whose
place in the segment is o_j modulo r.  Rows r apart, segments w apart and (mostly) heads that shift by one
row each are all evenly spaced in memory, so each tile is a handful of strided views: no index tensors, no
padding.

Chunks carry their place in the whole sequence, and the keys' chunk may be another one than the queries'.
One device is the case of a single chunk that starts at 0; a ring is the case of many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from torch import Tensor

OffsetRule = Literal["paper", "torchscale"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of the whole sequence: `start` is the global position of the first."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Branch:
    """One pair of segment length and dilation, and what decides which head takes which rows."""

    segment: int
    dilation: int
    heads: int
    rule: OffsetRule = "paper"

    @property
    def heads_per_offset(self) -> int:
        return -(-self.heads // self.dilation)

    def heads_at(self, offset: int) -> range:
        """The heads that attend among rows `offset` modulo the dilation."""
        if self.rule == "paper":
            return range(offset, self.heads, self.dilation)
        first = offset * self.heads_per_offset
        return range(first, min(first + self.heads_per_offset, self.heads))


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Evenly spaced heads with evenly spaced rows: head i of the run starts `i * row_shift` rows later."""

    head: int
    head_step: int
    count: int
    q_row: int  # row of the query chunk where the first head starts
    k_row: int  # the same in the key chunk
    row_shift: int

    def view(self, x_BNHx: Tensor, row: int, tile: Tile, rows: int) -> Tensor:
        """(b, segments, heads of the run, rows, x): the run's entries of a tensor laid out (b, n, h, x)."""
        b_step, n_step, h_step, x_step = x_BNHx.stride()
        head_step = self.head_step * h_step + self.row_shift * n_step
        return x_BNHx.as_strided(
            (x_BNHx.shape[0], tile.segments, self.count, rows, x_BNHx.shape[3]),
            (b_step, tile.segment * n_step, head_step, tile.dilation * n_step, x_step),
            x_BNHx.storage_offset() + row * n_step + self.head * h_step,
        )

    def halves(self) -> list[HeadRun]:
        """Its first heads and its last, none where there is only one."""
        first = self.count // 2
        if first == 0:
            return []
        skip = first * self.row_shift
        last = replace(
            self,
            head=self.head + first * self.head_step,
            count=self.count - first,
            q_row=self.q_row + skip,
            k_row=self.k_row + skip,
        )
        return [replace(self, count=first), last]


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel call: equal segments, all heads of `runs`, `q_rows` by `k_rows` scores for each."""

    segments: int
    segment: int
    dilation: int
    q_rows: int
    k_rows: int
    causal: bool
    runs: tuple[HeadRun, ...]

    @property
    def heads(self) -> int:
        return sum(run.count for run in self.runs)

    def query_views(self, x_BNHx: Tensor) -> list[Tensor]:
        return [run.view(x_BNHx, run.q_row, self, self.q_rows) for run in self.runs]

    def key_views(self, x_BNHx: Tensor) -> list[Tensor]:
        return [run.view(x_BNHx, run.k_row, self, self.k_rows) for run in self.runs]

    def places(self, batch: int) -> list[list[tuple[int, int, int]]]:
        """Batch entry, head and first query row of every segment's heads: no two of a branch are alike."""
        return [
            [
                (entry, run.head + i * run.head_step, run.q_row + i * run.row_shift + segment * self.segment)
                for run in self.runs
                for i in range(run.count)
            ]
            for entry in range(batch)
            for segment in range(self.segments)
        ]

    def part(self, first: int, stop: int) -> Tile:
        """The same tile over segments first..stop-1 of its own."""
        skip = first * self.segment
        runs = tuple(replace(run, q_row=run.q_row + skip, k_row=run.k_row + skip) for run in self.runs)
        return replace(self, segments=stop - first, runs=runs)

    def slabs(self, most: int) -> Iterator[Tile]:
        """Split so that no slab has more than `most` segments: temporaries stay small at any length."""
        for first in range(0, self.segments, most):
            yield self.part(first, min(first + most, self.segments))

    def described(self) -> str:
        """For messages."""
        return f"{self.segments} segments of {self.heads} heads and {self.q_rows} rows"

    def halves(self) -> list[Tile]:
        """Two tiles that do the same, by segments or else by heads; none where there is one of each."""
        if self.segments > 1:
            middle = self.segments // 2
            return [self.part(0, middle), self.part(middle, self.segments)]
        if len(self.runs) > 1:
            middle = len(self.runs) // 2
            return [replace(self, runs=self.runs[:middle]), replace(self, runs=self.runs[middle:])]
        return [replace(self, runs=(run,)) for run in self.runs[0].halves()]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Equal segments of which the chunks hold the places q and k; rows are counted inside the chunks."""

    segments: int
    q_base: (
        int  # row of the query chunk at the first segment's place 0 (negative if that lies before the chunk)
    )
    k_base: int
    q: range
    k: range
    causal: bool


@lru_cache(maxsize=1024)
def tiles(branch: Branch, queries: Chunk, keys: Chunk, causal: bool) -> tuple[Tile, ...]:
    """All kernel calls of a branch for the queries of one chunk over the keys of another or the same."""
    assert queries == keys or queries.stop <= keys.start or keys.stop <= queries.start
    stretches = _within(branch.segment, queries, causal) if queries == keys else []
    if queries != keys and not (causal and keys.start > queries.start):
        stretches = _between(branch.segment, queries, keys)
    return tuple(tile for stretch in stretches for tile in _tiles_of(branch, stretch))


def _within(w: int, chunk: Chunk, causal: bool) -> list[_Stretch]:
    """A chunk with itself: the rest of a segment begun before it, whole ones, the beginning of the last."""

    def stretch(position: int, count: int, length: int) -> _Stretch:
        place = position % w
        base = position - place - chunk.start
        return _Stretch(count, base, base, range(place, place + length), range(place, place + length), causal)

    found: list[_Stretch] = []
    at = chunk.start
    if at % w:
        length = min(w - at % w, chunk.length)
        found.append(stretch(at, 1, length))
        at += length
    if whole := (chunk.stop - at) // w:
        found.append(stretch(at, whole, w))
        at += whole * w
    if at < chunk.stop:
        found.append(stretch(at, 1, chunk.stop - at))
    return found


def _between(w: int, queries: Chunk, keys: Chunk) -> list[_Stretch]:
    """Two chunks apart share at most one segment, the one that holds all that lies between them."""
    early, late = sorted((queries, keys), key=lambda chunk: chunk.start)
    if not (early.length and late.length) or (early.stop - 1) // w != late.start // w:
        return []
    start = late.start // w * w

    def places(chunk: Chunk) -> range:
        return range(max(chunk.start, start) - start, min(chunk.stop, start + w) - start)

    return [_Stretch(1, start - queries.start, start - keys.start, places(queries), places(keys), False)]


def _first(places: range, offset: int, dilation: int) -> int:
    return places.start + (offset - places.start) % dilation


def _tiles_of(branch: Branch, stretch: _Stretch) -> Iterator[Tile]:
    """Offsets that find equally many rows share a tile; so there are at most four tiles, mostly one."""
    r = branch.dilation
    offsets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for offset in range(r):
        rows = tuple(len(range(_first(p, offset, r), p.stop, r)) for p in (stretch.q, stretch.k))
        if all(rows) and branch.heads_at(offset):
            offsets[rows[0], rows[1]].append(offset)
    for (q_rows, k_rows), shared in offsets.items():
        runs = tuple(
            run for group in _consecutive(shared, stretch, r) for run in _runs(branch, stretch, group)
        )
        yield Tile(stretch.segments, branch.segment, r, q_rows, k_rows, stretch.causal, runs)


def _consecutive(offsets: list[int], stretch: _Stretch, r: int) -> list[list[int]]:
    """Cut where the next offset's first row is not the next row: only such groups can be one strided view."""
    groups: list[list[int]] = []
    for offset in offsets:
        previous = groups[-1][-1] if groups else None
        if previous is not None and all(
            _first(p, offset, r) == _first(p, previous, r) + offset - previous for p in (stretch.q, stretch.k)
        ):
            groups[-1].append(offset)
        else:
            groups.append([offset])
    return [part for group in groups for part in _without_gaps(group)]


def _without_gaps(offsets: list[int]) -> Iterator[list[int]]:
    start = 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or offsets[i] != offsets[i - 1] + 1:
            yield offsets[start:i]
            start = i


def _runs(branch: Branch, stretch: _Stretch, offsets: list[int]) -> list[HeadRun]:
    """The fewer of two covers: a run for each offset, or one for the i-th heads of all offsets."""

    def run(head: int, step: int, count: int, offset: int, shift: int) -> HeadRun:
        q_row = stretch.q_base + _first(stretch.q, offset, branch.dilation)
        k_row = stretch.k_base + _first(stretch.k, offset, branch.dilation)
        return HeadRun(head, step, count, q_row, k_row, shift)

    def step(heads: list[int]) -> int:
        return heads[1] - heads[0] if len(heads) > 1 else 1

    by_offset = {offset: list(branch.heads_at(offset)) for offset in offsets}
    deepest = max(len(heads) for heads in by_offset.values())
    if len(offsets) <= deepest:
        return [run(heads[0], step(heads), len(heads), o, 0) for o, heads in by_offset.items()]
    across = [[heads[i] for heads in by_offset.values() if i < len(heads)] for i in range(deepest)]
    return [run(heads[0], step(heads), len(heads), offsets[0], 1) for heads in across]

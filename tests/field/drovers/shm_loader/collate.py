"""Collation into segments."""
from typing import Callable, Iterator, List, Optional, Sequence

from .segments import Segment, SegmentTable


def collate(table: SegmentTable, samples: Sequence[list]) -> Optional[Segment]:
    """Returns an attached segment; the caller detaches it."""
    seg = table.attach(len(samples))  # clean: returned to the caller
    if seg is not None:
        seg.rows.extend(samples)
    return seg


def collate_filtered(table: SegmentTable, samples: Sequence[list],
                     keep: Callable[[list], bool]) -> Optional[Segment]:
    seg = table.attach(len(samples))  # leak: lost when every sample is filtered out
    if seg is None:
        return None
    seg.rows.extend(s for s in samples if keep(s))
    if not seg.rows:
        return None
    return seg


def padded_lengths(table: SegmentTable, samples: Sequence[list]) -> List[int]:
    seg = collate(table, samples)  # leak: only the lengths are copied out of it
    if seg is None:
        return []
    longest = max(len(r) for r in seg.rows)
    return [longest] * len(seg.rows)


def iter_collated(table: SegmentTable, chunks: Sequence[Sequence[list]]) -> Iterator[Segment]:
    """Each segment is valid until the next one is asked for."""
    for chunk in chunks:
        seg = collate(table, chunk)  # leak: a consumer that breaks leaves the generator before the detach
        if seg is None:
            return
        yield seg
        table.detach(seg)


def iter_guarded(table: SegmentTable, chunks: Sequence[Sequence[list]]) -> Iterator[Segment]:
    for chunk in chunks:
        seg = collate(table, chunk)  # clean: near miss, the finally also runs when the consumer closes the generator
        if seg is None:
            return
        try:
            yield seg
        finally:
            table.detach(seg)

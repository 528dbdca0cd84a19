"""Combinations of values in the order of their likelihood, as far as patience goes."""

import heapq
from collections.abc import Iterator, Sequence

Ranks = tuple[int, ...]


def likeliest(lengths: Sequence[int], most: int) -> Iterator[Ranks]:
    """Index tuples into lists of these lengths, best first, at most `most`.

    Parameters that are alike take values of one rank (three tensors of one shape), so a tuple costs its
    largest rank and little for the others.
    """
    if any(length == 0 for length in lengths):
        return
    start: Ranks = (0,) * len(lengths)
    waiting, seen, given = [(0.0, start)], {start}, 0
    while waiting and given < most:
        _, ranks = heapq.heappop(waiting)
        yield ranks
        given += 1
        for further in _neighbours(ranks, lengths):
            if further not in seen:
                seen.add(further)
                heapq.heappush(waiting, (_cost(further), further))


def _neighbours(ranks: Ranks, lengths: Sequence[int]) -> Iterator[Ranks]:
    for place, rank in enumerate(ranks):
        if rank + 1 < lengths[place]:
            yield (*ranks[:place], rank + 1, *ranks[place + 1 :])
    together = tuple(min(rank + 1, length - 1) for rank, length in zip(ranks, lengths, strict=True))
    if together != ranks:
        yield together


def _cost(ranks: Ranks) -> float:
    return max(ranks) + 0.25 * sum(set(ranks)) + 0.05 * sum(ranks)

"""The worker side: samples are read, collated and written into cells."""
from __future__ import annotations

import logging
import pickle
import random
from typing import Any, Callable, Optional, Sequence

from .ring import Cell, ShmRing

log = logging.getLogger(__name__)


def fill_cell(ring: ShmRing, samples: Sequence[Any]) -> Cell:
    """Waits for a vacant cell and writes the batch into it."""
    blob = pickle.dumps(list(samples), protocol=5)
    cell = ring.obtain()  # clean: handed on to the caller
    cell.write(blob[: ring.cell_bytes])
    return cell


def worker_main(ring: ShmRing, dataset, indices, out, collate: Callable[[list], list]) -> None:
    """Process entry. `out` carries (batch number, cell number, bytes used) to the loader."""
    while (task := indices.get()) is not None:
        batch_no, wanted = task
        samples = collate([dataset[i] for i in wanted])
        cell = fill_cell(ring, samples)  # clean: near miss, the number goes to the loader, which recycles the cell
        out.put((batch_no, cell.number, cell.used))
        cell.mem.release()


def filtering_worker(ring: ShmRing, dataset, indices, out, keep: Callable[[bytes], bool]) -> int:
    dropped = 0
    while (task := indices.get()) is not None:
        batch_no, wanted = task
        cell = fill_cell(ring, [dataset[i] for i in wanted])  # leak: a batch that isn't kept is dropped with its cell
        if not keep(cell.read()):
            dropped += 1
            log.debug("batch %d not kept", batch_no)
            continue
        out.put((batch_no, cell.number, cell.used))
    return dropped


def shuffling_worker(ring: ShmRing, dataset, indices, out, depth: int, seed: int) -> None:
    """Keeps `depth` filled cells back and hands them over in random order."""
    rng = random.Random(seed)
    kept: list[tuple[int, Cell]] = []
    while (task := indices.get()) is not None:
        batch_no, wanted = task
        cell = fill_cell(ring, [dataset[i] for i in wanted])  # clean: near miss, kept back, all are handed over in the end
        kept.append((batch_no, cell))
        if len(kept) > depth:
            no, chosen = kept.pop(rng.randrange(len(kept)))
            out.put((no, chosen.number, chosen.used))
    for no, chosen in kept:
        out.put((no, chosen.number, chosen.used))


def largest(ring: ShmRing, dataset, sample_ids: Sequence[int]) -> Optional[int]:
    best: Optional[Cell] = None
    best_id: Optional[int] = None
    for i in sample_ids:
        cell = fill_cell(ring, [dataset[i]])  # leak: a former best cell is rebound without being recycled
        if best is None or cell.used > best.used:
            best, best_id = cell, i
        else:
            ring.recycle(cell)
    if best is not None:
        ring.recycle(best)
    return best_id

"""Worker side: reads samples, packs them to sequences, puts (order, index, shape) in the result queue."""
from __future__ import annotations

import multiprocessing as mp
from typing import Callable, Sequence

import numpy as np

from .slots import SlotTable

Sample = np.ndarray


def pack_into(rows: Sequence[Sample], out: np.ndarray) -> int:
    at = 0
    for r in rows:
        n = min(len(r), out.shape[0] - at)
        out[at : at + n] = r[:n]
        at += n
    out[at:] = 0
    return at


def worker_loop(table: SlotTable, tasks: mp.Queue, results: mp.Queue, read: Callable, seq: int) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        order, keys = task
        rows = [read(k) for k in keys]
        index = table.checkout()  # clean: sent through the queue, the receiving side checks it in
        used = pack_into(rows, table.array(index, (seq,)))
        results.put((order, index, used))


def worker_loop_filtered(table: SlotTable, tasks, results, read, seq: int, least: int) -> None:
    """Drops batches with too few tokens; the order number is reported empty."""
    for order, keys in iter(tasks.get, None):
        index = table.checkout()  # leak: a batch under the least size reports -1 and abandons its slot
        used = pack_into([read(k) for k in keys], table.array(index, (seq,)))
        if used < least:
            results.put((order, -1, 0))
            continue
        results.put((order, index, used))


def worker_loop_recycling(table: SlotTable, tasks, results, read, seq: int, least: int) -> None:
    """As above, with the slot of a dropped batch kept for the next one."""
    spare: int | None = None
    for order, keys in iter(tasks.get, None):
        index = spare if spare is not None else table.checkout()  # clean: near miss, sent or kept as spare
        spare = None
        used = pack_into([read(k) for k in keys], table.array(index, (seq,)))
        if used < least:
            results.put((order, -1, 0))
            spare = index
        else:
            results.put((order, index, used))
    if spare is not None:
        table.checkin(spare)

"""Front of the feeder: submits texts, hands out batches, keeps replay samples."""
from __future__ import annotations

import queue
from typing import Any, Callable, Dict, Iterator, List, Optional

import numpy as np

from .arena import Cell, ShmArena
from .worker import CollateWorker


class Batch:
    def __init__(self, arena: ShmArena, cells: List[Cell]) -> None:
        self.arena = arena
        self.cells = cells

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *exc: Any) -> None:
        while self.cells:
            self.arena.release(self.cells.pop())


class FeedLoader:
    def __init__(self, arena: ShmArena, tokenize: Callable[[str], List[int]]) -> None:
        self.arena = arena
        self.tasks: "queue.Queue[Any]" = queue.Queue()
        self.results: "queue.Queue[Any]" = queue.Queue()
        self.worker = CollateWorker(arena, self.tasks, self.results, tokenize)
        self.replay: List[Cell] = []
        self.best: Optional[Cell] = None

    def start(self, texts: List[str]) -> None:
        self.worker.start()
        for i, text in enumerate(texts):
            self.tasks.put({"kind": "single", "id": i, "text": text})
        self.tasks.put({"kind": "pack", "id": -1, "texts": texts})
        self.tasks.put(None)

    def batches(self, size: int) -> Iterator[np.ndarray]:
        cells: List[Cell] = []
        while True:
            rec = self.results.get()
            if rec is None:
                break
            if rec["cell"] is None:
                continue
            cells.append(rec["cell"])
            if len(cells) == size:
                with Batch(self.arena, cells) as batch:
                    stacked = np.stack([c.array for c in batch.cells])
                yield stacked
                cells = []
        for cell in cells:
            self.arena.release(cell)

    def keep_for_replay(self, cell: Cell) -> None:
        self.replay.append(self.arena.retain(cell))  # clean: near miss, retained for the list, trim and close release it

    def trim(self, limit: int) -> None:
        while len(self.replay) > limit:
            self.arena.release(self.replay.pop(0))

    def note_best(self, cell: Cell) -> None:
        if self.best is cell:
            return
        self.best = self.arena.retain(cell)  # leak: the reference to the former best is written over

    def pad_batch(self, rows: List[List[int]]) -> Optional[np.ndarray]:
        cells: List[Cell] = []
        for row in rows:
            cell = self.arena.acquire(timeout=0.5)  # leak: a timeout in the middle drops the list of cells already filled
            if cell is None:
                return None
            cell.array[:len(row)] = row
            cells.append(cell)
        with Batch(self.arena, cells) as batch:
            return np.stack([c.array for c in batch.cells])

    def try_batch(self, rows: List[List[int]]) -> Optional[np.ndarray]:
        with Batch(self.arena, []) as batch:
            for row in rows:
                cell = self.arena.acquire(timeout=0.5)  # clean: near miss, in the batch before any return, whose exit releases it
                if cell is None:
                    return None
                batch.cells.append(cell)
                cell.array[:len(row)] = row
            return np.stack([c.array for c in batch.cells])

    def share(self, cell: Cell, readers: int) -> List[Cell]:
        return [self.arena.retain(cell) for _ in range(readers)]  # clean: one reference for each reader in the returned list

    def score(self, cell: Cell, readers: List[Callable[[np.ndarray], float]]) -> float:
        total = 0.0
        shared = self.share(cell, len(readers))  # leak: a negative score breaks off and the references behind it stay
        for ref, reader in zip(shared, readers):
            value = reader(ref.array)
            self.arena.release(ref)
            if value < 0:
                break
            total += value
        return total

    def average(self, cell: Cell, readers: List[Callable[[np.ndarray], float]]) -> float:
        shared = self.share(cell, len(readers))  # clean: near miss, one release for each reference after the scores
        values = [reader(ref.array) for ref, reader in zip(shared, readers)]
        for ref in shared:
            self.arena.release(ref)
        return sum(values) / max(len(values), 1)

    def close(self) -> None:
        while self.worker.is_alive() or not self.results.empty():
            try:
                rec = self.results.get(timeout=0.1)
            except queue.Empty:
                continue
            if rec is not None and rec["cell"] is not None:
                self.arena.release(rec["cell"])
        self.trim(0)
        if self.best is not None:
            self.arena.release(self.best)
            self.best = None

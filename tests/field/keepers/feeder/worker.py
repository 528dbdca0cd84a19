"""Collating worker threads: token lists in, filled cells out."""
from __future__ import annotations

import queue
import threading
from typing import Any, Callable, Dict, List, Optional

from .arena import Cell, ShmArena


class CollateWorker(threading.Thread):
    def __init__(self, arena: ShmArena, tasks: "queue.Queue[Any]", results: "queue.Queue[Any]",
                 tokenize: Callable[[str], List[int]]) -> None:
        super().__init__(daemon=True)
        self.arena = arena
        self.tasks = tasks
        self.results = results
        self.tokenize = tokenize

    def run(self) -> None:
        while True:
            task = self.tasks.get()
            if task is None:
                self.results.put(None)
                return
            if task["kind"] == "pack":
                self._pack(task)
            else:
                self._single(task)

    def _single(self, task: Dict[str, Any]) -> None:
        cell = self.arena.acquire()  # leak: a text that cannot be tokenized reports an error and keeps the cell
        try:
            tokens = self.tokenize(task["text"])
        except ValueError as err:
            self.results.put({"id": task["id"], "error": str(err), "cell": None})
            return
        n = min(len(tokens), cell.array.size)
        cell.array[:n] = tokens[:n]
        self.results.put({"id": task["id"], "cell": cell, "n": n})

    def _pack(self, task: Dict[str, Any]) -> None:
        cell: Optional[Cell] = None
        fill = 0
        for text in task["texts"]:
            try:
                tokens = self.tokenize(text)
            except ValueError:
                continue
            if cell is not None and fill + len(tokens) > cell.array.size:
                self.results.put({"id": task["id"], "cell": cell, "n": fill})
                cell = None
            if cell is None:
                cell, fill = self.arena.acquire(), 0  # clean: near miss, the full one is already with the results, the last follows below
            n = min(len(tokens), cell.array.size - fill)
            cell.array[fill:fill + n] = tokens[:n]
            fill += n
        if cell is not None:
            self.results.put({"id": task["id"], "cell": cell, "n": fill})

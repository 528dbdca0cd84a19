"""Worker tasks that carry staging cells through queues and tables."""
from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


@dataclass
class Cell:
    ident: int
    data: bytes = b""


@dataclass
class Task:
    name: str
    payload: bytes = b""
    cell: Optional[Cell] = None
    extra: List[Cell] = field(default_factory=list)
    cancelled: bool = False


class CellRack:
    def __init__(self, n: int):
        self._empty: Deque[Cell] = deque(Cell(i) for i in range(n))

    def pull(self) -> Optional[Cell]:
        if not self._empty:
            return None
        cell = self._empty.popleft()  # clean: handed to the caller
        cell.data = b""
        return cell

    async def pull_wait(self) -> Cell:
        while not self._empty:
            await asyncio.sleep(0.001)
        return self._empty.popleft()  # clean: handed to the caller

    def push(self, cell: Cell) -> None:
        self._empty.append(cell)


class TaskBoard:
    def __init__(self, rack: CellRack):
        self.rack = rack
        self.ready: Deque[Task] = deque()
        self.running: Dict[str, Task] = {}

    def post(self, name: str, payload: bytes) -> bool:
        cell = self.rack.pull()  # clean: moved into a task, finish or cancel_ready pushes it back
        if cell is None:
            return False
        cell.data = payload
        self.ready.append(Task(name, payload, cell))
        return True

    def start_next(self) -> Optional[Task]:
        """Move a ready task to the running table."""
        if not self.ready or self.ready[0].name in self.running:
            return None
        task = self.ready.popleft()
        self.running[task.name] = task
        return task

    def widen(self, task: Task, n: int) -> bool:
        """Give a running task n more cells or none."""
        got: List[Cell] = []
        for _ in range(n):
            cell = self.rack.pull()  # clean: near miss, the shortfall pushes all of got, else the task's extra holds them
            if cell is None:
                for g in got:
                    self.rack.push(g)
                return False
            got.append(cell)
        task.extra.extend(got)
        return True

    def widen_even(self, task: Task, n: int) -> bool:
        got: List[Cell] = []
        for _ in range(n):
            cell = self.rack.pull()  # leak: an odd number of cells is refused without pushing them back
            if cell is None:
                break
            got.append(cell)
        if len(got) % 2:
            return False
        task.extra.extend(got)
        return True

    def finish(self, name: str) -> None:
        task = self.running.pop(name, None)
        if task is None:
            return
        self._strip(task)

    def _strip(self, task: Task) -> None:
        if task.cell is not None:
            self.rack.push(task.cell)
            task.cell = None
        while task.extra:
            self.rack.push(task.extra.pop())

    def cancel_ready(self) -> None:
        while self.ready:
            task = self.ready.popleft()
            task.cancelled = True
            self._strip(task)


class Relay:
    """Tasks that wait for an answer from another node."""

    def __init__(self, rack: CellRack):
        self.rack = rack
        self.waiting: Dict[str, Task] = {}
        self.spill: Dict[str, Cell] = {}

    def park(self, task: Task) -> bool:
        if task.name in self.waiting or task.cell is not None:
            return False
        task.cell = self.rack.pull()  # clean: near miss, the task had no cell, answer and close push it back
        if task.cell is None:
            return False
        self.waiting[task.name] = task
        return True

    def park_copy(self, task: Task) -> bool:
        cell = self.rack.pull()  # leak: kept in spill, which neither answer nor close empties
        if cell is None:
            return False
        cell.data = task.payload
        self.spill[task.name] = cell
        return True

    def answer(self, name: str) -> bool:
        task = self.waiting.pop(name, None)
        if task is None or task.cell is None:
            return False
        self.rack.push(task.cell)
        task.cell = None
        return True

    def close(self) -> None:
        for name in list(self.waiting):
            self.answer(name)
        self.waiting.clear()

    async def ask(self, payload: bytes, send) -> bool:
        cell = await self.rack.pull_wait()  # leak: an empty reply returns without push
        cell.data = payload
        reply = await send(cell.data)
        if not reply:
            return False
        self.rack.push(cell)
        return True

    async def notify(self, payload: bytes, send) -> None:
        cell = await self.rack.pull_wait()  # clean: pushed back by the task that was given the cell
        cell.data = payload
        await asyncio.create_task(self._deliver(cell, send))

    async def _deliver(self, cell: Cell, send) -> None:
        try:
            await send(cell.data)
        finally:
            self.rack.push(cell)

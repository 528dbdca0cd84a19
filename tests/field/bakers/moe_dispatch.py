"""Expert-parallel token dispatch: capacity permits, send windows, combine buffers."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

log = logging.getLogger("moe")


@dataclass
class Window:
    """A region of the symmetric all-to-all heap."""

    offset: int
    rows: int
    payload: List[Any] = field(default_factory=list)


class SymmetricHeap:
    def __init__(self, rows: int) -> None:
        self._holes: List[Tuple[int, int]] = [(0, rows)]

    def alloc(self, rows: int) -> Optional[Window]:
        """First fit; None when no hole is large enough."""
        for i, (off, size) in enumerate(self._holes):
            if size >= rows:
                if size == rows:
                    del self._holes[i]
                else:
                    self._holes[i] = (off + rows, size - rows)
                return Window(off, rows)
        return None

    def free(self, win: Window) -> None:
        win.payload.clear()
        self._holes.append((win.offset, win.rows))
        self._holes.sort()
        merged: List[Tuple[int, int]] = []
        for off, size in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((off, size))
        self._holes = merged


class CapacityPermits:
    """Per-expert limit on tokens in flight."""

    def __init__(self, experts: int, capacity: int) -> None:
        self.capacity = capacity
        self._taken = [0] * experts

    def take(self, expert: int) -> bool:
        if self._taken[expert] >= self.capacity:
            return False
        self._taken[expert] += 1
        return True

    def put_back(self, expert: int) -> None:
        self._taken[expert] -= 1


@dataclass
class DispatchTicket:
    expert: int
    window: Window
    tokens: List[int]


class Dispatcher:
    def __init__(self, heap: SymmetricHeap, permits: CapacityPermits) -> None:
        self.heap = heap
        self.permits = permits
        self.open_tickets: Dict[int, DispatchTicket] = {}
        self.dropped: List[int] = []
        self._next_id = 0

    def route(self, assignment: Dict[int, List[int]]) -> List[int]:
        """Opens one ticket per expert; returns the ticket ids."""
        ids = []
        for expert, tokens in assignment.items():
            if not self.permits.take(expert):  # clean: a failed take holds nothing, put back without a window, else close_ticket puts back
                self.dropped.extend(tokens)
                continue
            window = self.heap.alloc(len(tokens))  # clean: None-checked, else kept in the ticket table
            if window is None:
                self.permits.put_back(expert)
                self.dropped.extend(tokens)
                continue
            window.payload.extend(tokens)
            self.open_tickets[self._next_id] = DispatchTicket(expert, window, tokens)
            ids.append(self._next_id)
            self._next_id += 1
        return ids

    def close_ticket(self, ticket_id: int) -> List[int]:
        ticket = self.open_tickets.pop(ticket_id)
        out = list(ticket.window.payload)
        self.heap.free(ticket.window)
        self.permits.put_back(ticket.expert)
        return out

    def route_one(self, expert: int, tokens: List[int]) -> Optional[DispatchTicket]:
        if not self.permits.take(expert):  # leak: permit is not put back when the heap has no room
            return None
        window = self.heap.alloc(len(tokens))  # clean: near miss, the bare return is for None only, else moved into the ticket
        if window is None:
            return None
        window.payload.extend(tokens)
        return DispatchTicket(expert, window, tokens)

    def finish_one(self, ticket: DispatchTicket) -> None:
        self.heap.free(ticket.window)
        self.permits.put_back(ticket.expert)

    def run_one(self, expert: int, tokens: List[int], ffn: Callable[[List[int]], List[int]]) -> List[int]:
        ticket = self.route_one(expert, tokens)  # leak: an empty result returns before finish_one
        if ticket is None:
            return []
        result = ffn(ticket.window.payload)
        if not result:
            return []
        self.finish_one(ticket)
        return result

    def claim_coolest(self, loads: Sequence[int]) -> int:
        """Takes a permit on the least loaded expert that has room; -1 if none has."""
        best = -1
        for expert, load in enumerate(loads):
            if not self.permits.take(expert):  # leak: an earlier best is replaced without its permit being put back
                continue
            if best >= 0 and load >= loads[best]:
                self.permits.put_back(expert)
                continue
            best = expert
        return best

    def run_coolest(self, loads: Sequence[int], fn: Callable[[int], Any]) -> Any:
        expert = self.claim_coolest(loads)  # clean: -1 holds nothing, else put back in finally
        if expert < 0:
            return None
        try:
            return fn(expert)
        finally:
            self.permits.put_back(expert)

    def reserve_rows(self, sizes: Iterable[int]) -> Optional[List[Window]]:
        got: List[Window] = []
        for rows in sizes:
            window = self.heap.alloc(rows)  # clean: all freed when one fails, else returned as a list
            if window is None:
                for w in got:
                    self.heap.free(w)
                return None
            got.append(window)
        return got

    def reserve_rows_best_effort(self, sizes: Sequence[int]) -> List[Window]:
        got: List[Window] = []
        for rows in sizes:
            window = self.heap.alloc(rows)  # leak: the list is emptied on a failure without freeing
            if window is None:
                got = []
                continue
            got.append(window)
        return got

    def all_to_all(self, sizes: Sequence[int], send: Callable[[Window], None]) -> bool:
        windows = self.reserve_rows(sizes)  # clean: None holds nothing, each is freed after the send
        if windows is None:
            return False
        for w in windows:
            send(w)
        for w in windows:
            self.heap.free(w)
        return True

    def combine(self, parts: List[List[float]], scale: Optional[float]) -> List[float]:
        acc = self.heap.alloc(len(parts[0]))  # clean: near miss, the late branch frees what the first test found
        if acc is not None:
            acc.payload.extend([0.0] * len(parts[0]))
        total = acc.payload if acc is not None else [0.0] * len(parts[0])
        for part in parts:
            for i, v in enumerate(part):
                total[i] += v * (scale or 1.0)
        out = list(total)
        if acc is not None:
            self.heap.free(acc)
        return out


class AsyncExpertPool:
    """Runs expert calls as tasks with a bound on concurrency."""

    def __init__(self, limit: int) -> None:
        self._gate = asyncio.Semaphore(limit)
        self._tasks: List[asyncio.Task] = []
        self.failed = 0

    async def _run(self, fn: Callable[[], Any]) -> Any:
        try:
            await asyncio.sleep(0)
            return fn()
        finally:
            self._gate.release()

    async def submit(self, fn: Callable[[], Any]) -> asyncio.Task:
        await self._gate.acquire()  # clean: near miss, the task releases it in its finally
        task = asyncio.create_task(self._run(fn))
        self._tasks.append(task)
        return task

    async def call(self, fn: Callable[[], Any], default: Any = None) -> Any:
        await self._gate.acquire()  # leak: an error in fn is survived without a release
        try:
            value = fn()
        except ValueError as exc:
            log.info("expert rejected the batch: %s", exc)
            self.failed += 1
            return default
        self._gate.release()
        return value

    async def call_guarded(self, fn: Callable[[], Any], default: Any = None) -> Any:
        async with self._gate:
            try:
                return fn()
            except ValueError:
                self.failed += 1
                return default

    async def drain(self) -> None:
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)

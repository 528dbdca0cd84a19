"""Decoder state slots for stateful streaming models (RNN-T), addressed by (slot, epoch)."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import AsyncIterator, NamedTuple

import torch


class SlotHandle(NamedTuple):
    slot: int
    epoch: int


class SlotTable:
    """A slot's epoch rises each time it is vacated, so stale handles are recognised."""

    def __init__(self, slots: int, width: int) -> None:
        self.state = torch.zeros(slots, width)
        self._vacant: set[int] = set(range(slots))
        self._epoch = [0] * slots

    def occupy(self) -> SlotHandle | None:
        if not self._vacant:
            return None
        slot = self._vacant.pop()  # clean: goes out in the handle
        return SlotHandle(slot, self._epoch[slot])

    def vacate(self, handle: SlotHandle) -> bool:
        if self._epoch[handle.slot] != handle.epoch:
            return False
        self._epoch[handle.slot] += 1
        self._vacant.add(handle.slot)
        return True

    def row(self, handle: SlotHandle) -> torch.Tensor:
        return self.state[handle.slot]


class SlotScope:
    """Scope around a slot, either its own or one lent by the session."""

    def __init__(self, table: SlotTable, handle: SlotHandle | None = None) -> None:
        self.table = table
        self.borrowed = handle is not None
        self.handle = handle

    def __enter__(self) -> SlotHandle | None:
        if self.handle is None:
            self.handle = self.table.occupy()  # clean: near miss, the early return of __exit__ is for borrowed slots
        return self.handle

    def __exit__(self, *exc) -> None:
        if self.borrowed or self.handle is None:
            return
        self.table.vacate(self.handle)
        self.handle = None


@dataclass
class StreamState:
    sid: str
    handle: SlotHandle | None = None
    emitted: int = 0


class StreamingDecoder:
    def __init__(self, table: SlotTable, cell: torch.nn.Module) -> None:
        self.table = table
        self.cell = cell
        self.streams: dict[str, StreamState] = {}
        self.arrivals: asyncio.Queue[SlotHandle] = asyncio.Queue()

    def connect(self, sid: str) -> StreamState | None:
        if sid in self.streams:
            return self.streams[sid]
        handle = self.table.occupy()  # clean: stays in the stream until disconnect
        if handle is None:
            return None
        st = self.streams[sid] = StreamState(sid, handle)
        return st

    def disconnect(self, sid: str) -> None:
        st = self.streams.pop(sid, None)
        if st is not None and st.handle is not None:
            self.table.vacate(st.handle)
            st.handle = None

    def park(self, sid: str) -> torch.Tensor:
        st = self.streams[sid]
        saved = self.table.row(st.handle).clone()
        self.table.vacate(st.handle)
        st.handle = None
        return saved

    def resume(self, sid: str, saved: torch.Tensor) -> bool:
        st = self.streams[sid]
        handle = self.table.occupy()  # leak: state of another width is refused without vacating the slot
        if handle is None:
            return False
        if saved.shape != self.table.row(handle).shape:
            return False
        if st.handle is not None:
            self.table.vacate(st.handle)
        self.table.row(handle).copy_(saved)
        st.handle = handle
        return True

    def reset(self, sid: str) -> None:
        st = self.streams[sid]
        old = st.handle
        st.handle = self.table.occupy()  # clean: near miss, old is vacated right after
        if old is not None:
            self.table.vacate(old)
        st.emitted = 0

    def fork(self, sid: str, new_sid: str) -> bool:
        handle = self.table.occupy()  # leak: a stream already named new_sid is overwritten with its slot
        if handle is None:
            return False
        self.table.row(handle).copy_(self.table.row(self.streams[sid].handle))
        self.streams[new_sid] = StreamState(new_sid, handle, self.streams[sid].emitted)
        return True

    def step(self, sid: str, x: torch.Tensor) -> torch.Tensor:
        row = self.table.row(self.streams[sid].handle)
        row.copy_(self.cell(x, row))
        return row

    def one_shot(self, xs: list[torch.Tensor]) -> torch.Tensor | None:
        with SlotScope(self.table) as handle:  # clean: the scope owns the slot
            if handle is None:
                return None
            row = self.table.row(handle)
            row.zero_()
            for x in xs:
                row.copy_(self.cell(x, row))
            return row.clone()

    def speculative(self, sid: str, xs: list[torch.Tensor]) -> torch.Tensor | None:
        """Decode ahead on a copy of the stream's state."""
        extra = self.table.occupy()  # leak: lent to a scope that treats it as borrowed and never vacates it
        if extra is None:
            return None
        with SlotScope(self.table, extra) as handle:
            row = self.table.row(handle)
            row.copy_(self.table.row(self.streams[sid].handle))
            for x in xs:
                row.copy_(self.cell(x, row))
            return row.clone()

    async def reserve_ahead(self, n: int) -> int:
        for i in range(n):
            handle = self.table.occupy()  # clean: near miss, queued, drained by cancel_reservations
            if handle is None:
                return i
            await self.arrivals.put(handle)
        return n

    def cancel_reservations(self) -> None:
        while not self.arrivals.empty():
            self.table.vacate(self.arrivals.get_nowait())  # clean: vacated in the same expression

    async def accept(self, sid: str) -> bool:
        handle = await self.arrivals.get()  # leak: a sid that is already connected loses the reserved slot
        if sid in self.streams:
            return False
        self.streams[sid] = StreamState(sid, handle)
        return True

    async def transcribe(self, audio: AsyncIterator[torch.Tensor]) -> list[int]:
        ids: list[int] = []
        handle = self.table.occupy()  # leak: the break on silence skips the else branch that vacates
        if handle is None:
            return ids
        async for x in audio:
            if not x.any():
                break
            row = self.table.row(handle)
            row.copy_(self.cell(x, row))
            ids.append(int(row.argmax()))
        else:
            self.table.vacate(handle)
        return ids

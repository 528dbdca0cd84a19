"""Carries a worker's answer to the client through a bounded number of ring cells."""

import asyncio
import logging
import typing as t

log = logging.getLogger("routelet.relay")


class RelayClosed(Exception):
    pass


class Cell:
    __slots__ = ("data", "last")

    def __init__(self) -> None:
        self.data = b""
        self.last = False


class Ring:
    def __init__(self, n: int) -> None:
        self.empty: "asyncio.Queue[Cell]" = asyncio.Queue()
        for _ in range(n):
            self.empty.put_nowait(Cell())

    async def claim(self) -> Cell:
        return await self.empty.get()  # clean: the caller has it

    def claim_now(self) -> t.Optional[Cell]:
        try:
            return self.empty.get_nowait()  # clean: the caller has it
        except asyncio.QueueEmpty:
            return None

    def unclaim(self, cell: Cell) -> None:
        cell.data, cell.last = b"", False
        self.empty.put_nowait(cell)


class Relay:
    def __init__(self, ring: Ring, client: t.Any) -> None:
        self.ring = ring
        self.client = client
        self.filled: "asyncio.Queue[Cell]" = asyncio.Queue()
        self.closed = False

    def _hand_over(self, cell: Cell) -> None:
        if self.closed:
            raise RelayClosed
        self.filled.put_nowait(cell)

    async def feed(self, chunks: t.AsyncIterator[bytes]) -> None:
        async for data in chunks:
            cell = await self.ring.claim()  # leak: RelayClosed of _hand_over is handled by a return without unclaim
            cell.data = data
            try:
                self._hand_over(cell)
            except RelayClosed:
                log.info("client left")
                return
        cell = await self.ring.claim()  # clean: near miss, drain() unclaims it, or the handler does
        cell.last = True
        try:
            self._hand_over(cell)
        except RelayClosed:
            self.ring.unclaim(cell)

    async def drain(self) -> None:
        """Runs until the last cell or until the client breaks off."""
        last = False
        while not last:
            cell = await self.filled.get()
            last = cell.last
            try:
                await self.client.write(cell.data)
            except ConnectionError:
                self.closed = True
                break
            finally:
                self.ring.unclaim(cell)
        self.closed = True
        while not self.filled.empty():
            self.ring.unclaim(self.filled.get_nowait())

    def keepalive(self) -> bool:
        cell = self.ring.claim_now()  # clean: near miss, None, handed over, or unclaimed in the handler
        if cell is None:
            return False
        cell.data = b": ping\n\n"
        try:
            self._hand_over(cell)
        except RelayClosed:
            self.ring.unclaim(cell)
            return False
        return True

    def notice(self, text: str) -> bool:
        cell = self.ring.claim_now()  # leak: a text that is too long makes it return with the cell claimed
        if cell is None:
            return False
        data = text.encode()
        if len(data) > 1024:
            return False
        cell.data = data
        if self.closed:
            self.ring.unclaim(cell)
        else:
            self.filled.put_nowait(cell)
        return True

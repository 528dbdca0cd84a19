"""Dynamic batching server: requests occupy rows of one static decode batch."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional

log = logging.getLogger(__name__)


class RowMask:
    """Rows of the static batch as bits of one integer."""

    def __init__(self, rows: int) -> None:
        self._all = (1 << rows) - 1
        self._used = 0
        self._freed = asyncio.Event()

    def claim_row(self) -> Optional[int]:
        open_rows = self._all & ~self._used
        if not open_rows:
            return None
        row = (open_rows & -open_rows).bit_length() - 1
        self._used |= 1 << row
        return row

    async def wait_row(self) -> int:
        while True:
            row = self.claim_row()  # clean: handed to the caller
            if row is not None:
                return row
            self._freed.clear()
            await self._freed.wait()

    def vacate(self, row: int) -> None:
        self._used &= ~(1 << row)
        self._freed.set()


@dataclass
class Generation:
    prompt: str
    limit: int
    row: Optional[int] = None
    tokens: list[int] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class BatchServer:
    EOS = 0

    def __init__(self, mask: RowMask, model) -> None:
        self.mask = mask
        self.model = model
        self._active: dict[int, Generation] = {}

    async def generate(self, prompt: str, limit: int) -> list[int]:
        gen = Generation(prompt, limit)
        gen.row = await self.mask.wait_row()  # clean: near miss, step() vacates it when generation stops
        self._active[gen.row] = gen
        await gen.stopped.wait()
        return gen.tokens

    def step(self) -> int:
        for row, token in self.model.decode(sorted(self._active)).items():
            gen = self._active[row]
            gen.tokens.append(token)
            if token == self.EOS or len(gen.tokens) >= gen.limit:
                del self._active[row]
                self.mask.vacate(row)
                gen.stopped.set()
        return len(self._active)

    async def stream(self, prompt: str, limit: int) -> AsyncIterator[int]:
        row = await self.mask.wait_row()  # leak: the end token returns with the row occupied
        self.model.prefill(row, prompt)
        for _ in range(limit):
            token = self.model.decode([row])[row]
            if token == self.EOS:
                return
            yield token
        self.mask.vacate(row)

    async def score(self, prompt: str, row: Optional[int] = None) -> float:
        """Log likelihood; runs in the caller's row when one is given."""
        borrowed = row is not None
        if not borrowed:
            row = await self.mask.wait_row()  # leak: the flag is tested the wrong way round at the end
        value = float(self.model.prefill(row, prompt))
        if borrowed:
            self.mask.vacate(row)
        return value

    def warm_up(self, rows: int) -> int:
        """Run the prefill once in several rows, so that the kernels are compiled."""
        claimed: list[int] = []
        while len(claimed) < rows:
            row = self.mask.claim_row()  # clean: all rows of the list are vacated below
            if row is None:
                break
            claimed.append(row)
            self.model.prefill(row, "warm")
        n = len(claimed)
        while claimed:
            self.mask.vacate(claimed.pop())
        return n

"""Offline batch runner: reads JSON lines, bounded workers, writes results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pathlib
import sys
import typing as t
from dataclasses import dataclass, field

logger = logging.getLogger("batch")


@dataclass
class Line:
    custom_id: str
    prompt: str
    tokens: int = 0


class TokenBudget:
    """How many prompt tokens may be in flight."""

    def __init__(self, total: int) -> None:
        self.left = total
        self._waiters: t.List["asyncio.Future[None]"] = []

    def try_reserve(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    async def reserve(self, n: int) -> None:
        while not self.try_reserve(n):  # clean: the caller of reserve gets the tokens
            fut: "asyncio.Future[None]" = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut

    def unreserve(self, n: int) -> None:
        self.left += n
        waiters, self._waiters = self._waiters, []
        for w in waiters:
            if not w.done():
                w.set_result(None)


class BudgetGuard:
    def __init__(self, budget: TokenBudget, n: int) -> None:
        self.budget, self.n = budget, n

    async def __aenter__(self) -> "BudgetGuard":
        await self.budget.reserve(self.n)  # clean: unreserved in __aexit__
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.budget.unreserve(self.n)


class SkippingGuard(BudgetGuard):
    async def __aenter__(self) -> "BudgetGuard":
        await self.budget.reserve(self.n)  # leak: the overriding __aexit__ does nothing for large shares
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.n > 4096:
            logger.info("%d tokens were in flight", self.n)
            return
        await super().__aexit__(*exc)


Handler = t.Callable[[Line], t.Awaitable[str]]


@dataclass
class BatchRunner:
    budget: TokenBudget
    handler: Handler
    max_tokens: int = 32768
    done: t.Dict[str, str] = field(default_factory=dict)
    reserved: t.Dict[str, int] = field(default_factory=dict)
    log_fh: t.Optional[t.TextIO] = None

    async def one(self, line: Line) -> None:
        async with BudgetGuard(self.budget, line.tokens):  # clean: with statement
            self.done[line.custom_id] = await self.handler(line)

    async def one_manual(self, line: Line) -> bool:
        await self.budget.reserve(line.tokens)  # leak: an empty answer returns with the share reserved
        text = await self.handler(line)
        if not text:
            return False
        self.done[line.custom_id] = text
        self.budget.unreserve(line.tokens)
        return True

    async def one_fast(self, line: Line) -> bool:
        if not self.budget.try_reserve(line.tokens):  # clean: near miss, unreserved before the answer is looked at
            return False
        text = await self.handler(line)
        self.budget.unreserve(line.tokens)
        if not text:
            return False
        self.done[line.custom_id] = text
        return True

    async def one_caught(self, line: Line) -> bool:
        await self.budget.reserve(line.tokens)  # leak: the handler for a bad line swallows it and does not unreserve
        try:
            if line.tokens > self.max_tokens:
                raise ValueError(line.custom_id)
            self.done[line.custom_id] = await self.handler(line)
            self.budget.unreserve(line.tokens)
        except ValueError:
            logger.error("%s is too long", line.custom_id)
            return False
        return True

    async def one_else(self, line: Line) -> bool:
        await self.budget.reserve(line.tokens)  # clean: near miss, the handler unreserves and so does the else
        try:
            if line.tokens > self.max_tokens:
                raise ValueError(line.custom_id)
            self.done[line.custom_id] = await self.handler(line)
        except ValueError:
            self.budget.unreserve(line.tokens)
            return False
        else:
            self.budget.unreserve(line.tokens)
        return True

    def hold(self, line: Line) -> bool:
        if line.custom_id in self.reserved:
            return False
        if not self.budget.try_reserve(line.tokens):  # clean: the amount is kept in the table until unhold
            return False
        self.reserved[line.custom_id] = line.tokens
        return True

    def unhold(self, custom_id: str) -> None:
        n = self.reserved.pop(custom_id, 0)
        if n:
            self.budget.unreserve(n)

    async def run(self, lines: t.Iterable[Line]) -> int:
        tasks = [asyncio.create_task(self.one(ln)) for ln in lines]
        await asyncio.gather(*tasks)
        return len(self.done)

    def read(self, path: pathlib.Path) -> t.Iterator[Line]:
        with path.open(encoding="utf-8") as fh:  # clean: with statement
            for raw in fh:
                obj = json.loads(raw)
                yield Line(obj["custom_id"], obj["prompt"], len(obj["prompt"].split()))

    def read_all(self, path: pathlib.Path) -> t.List[Line]:
        fh = open(path, encoding="utf-8")  # leak: the comment line ends the function before the close
        out: t.List[Line] = []
        for raw in fh:
            if raw.startswith("#"):
                return out
            obj = json.loads(raw)
            out.append(Line(obj["custom_id"], obj["prompt"]))
        fh.close()
        return out

    def write(self, path: t.Optional[str]) -> None:
        fh = open(path, "w", encoding="utf-8") if path else sys.stdout  # clean: near miss, closed under the same condition
        for cid, text in self.done.items():
            fh.write(json.dumps({"custom_id": cid, "text": text}) + "\n")
        if path:
            fh.close()

    def write_closing(self, path: str) -> int:
        with contextlib.closing(open(path, "w", encoding="utf-8")) as fh:  # clean: near miss, closing does it on both exits
            if not self.done:
                return 0
            fh.write(json.dumps(self.done))
        return len(self.done)

    def log_to(self, path: str) -> None:
        if self.log_fh is not None:
            self.log_fh.close()
        self.log_fh = open(path, "a", encoding="utf-8")  # clean: the one before is closed, close handles the last

    def close(self) -> None:
        for cid in list(self.reserved):
            self.unhold(cid)
        if self.log_fh is not None:
            self.log_fh.close()
            self.log_fh = None

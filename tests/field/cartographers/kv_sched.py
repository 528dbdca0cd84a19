"""Continuous-batching scheduler of one decode worker: KV blocks, batch rows, prefix sharing."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional


class State(Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3


@dataclass
class Req:
    rid: str
    prompt: list[int]
    max_new: int
    out: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    row: Optional[int] = None
    state: State = State.WAITING


class BlockBank:
    def __init__(self, n: int, size: int = 16):
        self.size = size
        self._free = deque(range(n))
        self._refs = [0] * n

    def draw(self) -> Optional[int]:
        if not self._free:
            return None
        b = self._free.popleft()
        self._refs[b] = 1
        return b

    def draw_many(self, n: int) -> Optional[list[int]]:
        if len(self._free) < n:
            return None
        return [self.draw() for _ in range(n)]  # clean: count checked first and the list is returned

    def share(self, b: int) -> int:
        self._refs[b] += 1
        return b

    def unref(self, b: int) -> None:
        self._refs[b] -= 1
        if self._refs[b] == 0:
            self._free.append(b)

    def refs(self, b: int) -> int:
        return self._refs[b]


class RowBank:
    def __init__(self, n: int):
        self._rows = list(range(n - 1, -1, -1))

    def sit(self) -> Optional[int]:
        return self._rows.pop() if self._rows else None

    def stand(self, row: int) -> None:
        self._rows.append(row)


class PrefixIndex:
    """Keeps one reference on each block of the prefixes it knows."""

    def __init__(self, bank: BlockBank, cap: int):
        self.bank = bank
        self.cap = cap
        self.table: dict[tuple, list[int]] = {}

    def insert(self, key: tuple, blocks: list[int]) -> None:
        if key in self.table:
            return
        while len(self.table) >= self.cap:
            self.evict_one()
        self.table[key] = [self.bank.share(b) for b in blocks]  # clean: near miss, the table's references go in evict_one()

    def evict_one(self) -> None:
        key = next(iter(self.table))
        for b in self.table.pop(key):
            self.bank.unref(b)

    def lookup(self, key: tuple) -> list[int]:
        return [self.bank.share(b) for b in self.table.get(key, ())]  # clean: shared references returned to the caller


class Scheduler:
    def __init__(self, bank: BlockBank, host: BlockBank, rows: RowBank, prefixes: PrefixIndex, mover):
        self.bank = bank
        self.host = host
        self.rows = rows
        self.prefixes = prefixes
        self.mover = mover
        self.waiting: deque[Req] = deque()
        self.running: dict[str, Req] = {}
        self.swapped: dict[str, tuple[Req, list[int]]] = {}

    def need(self, tokens: int) -> int:
        return -(-tokens // self.bank.size)

    def admit(self) -> int:
        n = 0
        while self.waiting:
            req = self.waiting[0]
            row = self.rows.sit()  # clean: stood up when no blocks, else kept in the request
            if row is None:
                break
            blocks = self.bank.draw_many(self.need(len(req.prompt)))  # clean: request keeps them until release()
            if blocks is None:
                self.rows.stand(row)
                break
            self.waiting.popleft()
            req.row, req.blocks, req.state = row, blocks, State.RUNNING
            self.running[req.rid] = req
            n += 1
        return n

    def admit_cached(self, req: Req) -> bool:
        """Admission of a request whose prefix may be known."""
        shared = self.prefixes.lookup(tuple(req.prompt[:64]))  # leak: references kept when the rest can not be drawn
        rest = self.need(len(req.prompt)) - len(shared)
        own = self.bank.draw_many(max(rest, 0))  # clean: kept in the request or unreferenced
        if own is None:
            return False
        row = self.rows.sit()  # clean: kept in the request
        if row is None:
            for b in shared + own:
                self.bank.unref(b)
            return False
        req.row, req.blocks, req.state = row, shared + own, State.RUNNING
        self.running[req.rid] = req
        return True

    def release(self, req: Req) -> None:
        while req.blocks:
            self.bank.unref(req.blocks.pop())
        if req.row is not None:
            self.rows.stand(req.row)
            req.row = None

    def finish(self, rid: str) -> list[int]:
        req = self.running.pop(rid)
        req.state = State.DONE
        self.release(req)
        return req.out

    def append_token(self, req: Req, tok: int) -> bool:
        req.out.append(tok)
        if self.need(len(req.prompt) + len(req.out)) <= len(req.blocks):
            return True
        b = self.bank.draw()  # clean: None or into the request's table
        if b is None:
            return False
        req.blocks.append(b)
        return True

    def reserve_lookahead(self, req: Req, depth: int) -> Optional[list[int]]:
        got: list[int] = []
        for _ in range(depth):
            b = self.bank.draw()  # leak: blocks drawn before the short one are lost
            if b is None:
                return None
            got.append(b)
        return got

    def speculate(self, req: Req, drafts: list[int], verify) -> int:
        extra = self.reserve_lookahead(req, self.need(len(drafts)))  # clean: unreferenced or moved into the request
        if extra is None:
            return 0
        accepted = verify(req, drafts, extra)
        keep = self.need(accepted)
        req.blocks.extend(extra[:keep])
        for b in extra[keep:]:
            self.bank.unref(b)
        req.out.extend(drafts[:accepted])
        return accepted

    def fork(self, req: Req, rid: str) -> Optional[Req]:
        child = Req(rid, req.prompt, req.max_new, list(req.out))
        child.blocks = [self.bank.share(b) for b in req.blocks]  # leak: the child is dropped when no row is free
        child.row = self.rows.sit()  # clean: kept in the child
        if child.row is None:
            return None
        child.state = State.RUNNING
        self.running[rid] = child
        return child

    def swap_out(self, rid: str) -> bool:
        req = self.running[rid]
        slots = self.host.draw_many(len(req.blocks))  # clean: near miss, into the swapped table, swap_in empties it
        if slots is None:
            return False
        self.mover.to_host(req.blocks, slots)
        del self.running[rid]
        self.release(req)
        req.state = State.SWAPPED
        self.swapped[rid] = (req, slots)
        return True

    def swap_in(self, rid: str) -> bool:
        req, slots = self.swapped[rid]
        row = self.rows.sit()  # leak: not stood up when the blocks can not be drawn
        if row is None:
            return False
        blocks = self.bank.draw_many(len(slots))  # clean: kept in the request
        if blocks is None:
            return False
        self.mover.to_device(slots, blocks)
        del self.swapped[rid]
        for s in slots:
            self.host.unref(s)
        req.row, req.blocks, req.state = row, blocks, State.RUNNING
        self.running[rid] = req
        return True

    def abort(self, rid: str) -> None:
        if rid in self.running:
            self.release(self.running.pop(rid))
        elif rid in self.swapped:
            _, slots = self.swapped.pop(rid)
            for s in slots:
                self.host.unref(s)

    def score_batch(self, prompts: list[list[int]], scorer) -> list[float]:
        scores = []
        for p in prompts:
            blocks = self.bank.draw_many(self.need(len(p)))  # leak: a NaN score goes on without giving them back
            if blocks is None:
                scores.append(0.0)
                continue
            s = scorer(p, blocks)
            if s != s:
                scores.append(0.0)
                continue
            scores.append(s)
            for b in blocks:
                self.bank.unref(b)
        return scores

"""Paged KV bookkeeping of the Lattice decoder: blocks, runs, prefixes, rows and swap."""
from __future__ import annotations

import hashlib
import threading
import uuid
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Dict, List, NamedTuple, Optional, Sequence


class BlockLedger:
    """Physical blocks with share counts. A block is a plain int."""

    __slots__ = ("_spare", "_shares", "peak")

    def __init__(self, count: int) -> None:
        self._spare = deque(range(count))
        self._shares = [0] * count
        self.peak = 0

    @property
    def spare(self) -> int:
        return len(self._spare)

    def take(self) -> Optional[int]:
        if not self._spare:
            return None
        block = self._spare.popleft()
        self._shares[block] = 1
        self.peak = max(self.peak, len(self._shares) - len(self._spare))
        return block

    def share(self, block: int) -> int:
        assert self._shares[block] > 0, "sharing a spare block"
        self._shares[block] += 1
        return block

    def drop(self, block: int) -> None:
        left = self._shares[block] - 1
        if left < 0:
            raise ValueError(f"block {block} dropped too often")
        self._shares[block] = left
        if left == 0:
            self._spare.append(block)


def grow_table(ledger: BlockLedger, table: List[int], want: int) -> bool:
    fresh: List[int] = []
    for _ in range(want):
        block = ledger.take()  # leak: blocks already in fresh are lost when the ledger runs dry half way
        if block is None:
            return False
        fresh.append(block)
    table.extend(fresh)
    return True


def fork_table(ledger: BlockLedger, parent: Sequence[int]) -> List[int]:
    child = []
    for block in parent:
        child.append(ledger.share(block))  # clean: the child table goes to the caller
    return child


def copy_on_write(ledger: BlockLedger, table: List[int], at: int, copy) -> None:
    new = ledger.take()  # clean: near miss, None holds nothing and else it replaces the old entry
    if new is None:
        raise MemoryError("no block for copy on write")
    old = table[at]
    copy(old, new)
    table[at] = new
    ledger.drop(old)


class PageBitmap:
    """Contiguous page runs in one big int; a set bit is a page in use."""

    def __init__(self, pages: int) -> None:
        self._bits = 0
        self._pages = pages
        self._guard = threading.Lock()
        self.high_water = 0

    def claim_run(self, n: int) -> int:
        mask = (1 << n) - 1
        with self._guard:
            for at in range(self._pages - n + 1):
                if not (self._bits >> at) & mask:
                    self._bits |= mask << at
                    self.high_water = max(self.high_water, at + n)
                    return at
        return -1

    def clear_run(self, at: int, n: int) -> None:
        mask = ((1 << n) - 1) << at
        with self._guard:
            if self._bits & mask != mask:
                raise ValueError("clearing pages that are not set")
            self._bits &= ~mask


def relocate(bitmap: PageBitmap, at: int, n: int, mover) -> int:
    to = bitmap.claim_run(n)  # leak: the new run stays set when the mover declines
    if to < 0:
        return at
    if not mover(at, to, n):
        return at
    bitmap.clear_run(at, n)
    return to


def sizes_that_fit(bitmap: PageBitmap, sizes: Sequence[int]) -> List[int]:
    fits = []
    for n in sizes:
        at = bitmap.claim_run(n)  # clean: near miss, -1 holds nothing and the others are cleared
        if at < 0:
            continue
        fits.append(n)
        bitmap.clear_run(at, n)
    return fits


class RunHolder:
    def __init__(self, bitmap: PageBitmap) -> None:
        self.bitmap = bitmap
        self.runs: Dict[str, tuple] = {}

    def put(self, rid: str, n: int) -> bool:
        if rid in self.runs:
            raise KeyError(rid)
        at = self.bitmap.claim_run(n)  # clean: kept by request id, cleared in remove
        if at < 0:
            return False
        self.runs[rid] = (at, n)
        return True

    def remove(self, rid: str) -> None:
        at, n = self.runs.pop(rid)
        self.bitmap.clear_run(at, n)


@dataclass
class RadixNode:
    depth: int = 0
    children: Dict[int, "RadixNode"] = field(default_factory=dict)
    locks: int = 0


class RadixShelf:
    """Prefix tree over token ids. A matched node can not be swept until it is unlocked."""

    def __init__(self) -> None:
        self.root = RadixNode()
        self.locked_total = 0

    def match(self, tokens: Sequence[int]) -> RadixNode:
        node = self.root
        for token in tokens:
            step = node.children.get(token)
            if step is None:
                break
            node = step
        node.locks += 1
        self.locked_total += 1
        return node

    def unlock(self, node: RadixNode) -> None:
        if node.locks == 0:
            raise RuntimeError("node is not locked")
        node.locks -= 1
        self.locked_total -= 1

    def sweep(self, node: Optional[RadixNode] = None) -> int:
        node = node or self.root
        gone = 0
        for token, child in list(node.children.items()):
            gone += self.sweep(child)
            if not child.children and child.locks == 0:
                del node.children[token]
                gone += 1
        return gone


def prefill_with_reuse(shelf: RadixShelf, tokens: List[int], prefill, floor: int = 16):
    node = shelf.match(tokens)  # leak: short matches return without unlocking the node
    if node.depth < floor:
        return prefill(tokens, None)
    try:
        return prefill(tokens[node.depth:], node)
    finally:
        shelf.unlock(node)


def mean_hit(shelf: RadixShelf, prompts) -> float:
    total = 0
    for prompt in prompts:
        node = shelf.match(prompt)  # clean: unlocked after its depth is read
        total += node.depth
        shelf.unlock(node)
    return total / max(1, len(prompts))


class PrefixSeat:
    def __init__(self, shelf: RadixShelf, tokens: List[int]) -> None:
        self.shelf = shelf
        self.node = shelf.match(tokens)  # clean: kept in the field, unlocked in finish

    def finish(self) -> None:
        self.shelf.unlock(self.node)


class RollingPrefix:
    def __init__(self, shelf: RadixShelf) -> None:
        self.shelf = shelf
        self.node: Optional[RadixNode] = None

    def advance(self, tokens: List[int]) -> int:
        self.node = self.shelf.match(tokens)  # leak: the node of the step before is overwritten while locked
        return self.node.depth

    def finish(self) -> None:
        if self.node is not None:
            self.shelf.unlock(self.node)
            self.node = None


class Row(NamedTuple):
    index: int
    generation: int


class RowMap:
    """Dense rows of the batch tensors, with generations so that stale handles are noticed."""

    def __init__(self, rows: int) -> None:
        self._generation = [0] * rows
        self._live = [False] * rows
        self._next = list(range(1, rows)) + [-1]
        self._head = 0 if rows else -1

    def enlist(self) -> Row:
        at = self._head
        if at < 0:
            raise LookupError("batch is full")
        self._head = self._next[at]
        self._live[at] = True
        return Row(at, self._generation[at])

    def strike(self, row: Row) -> None:
        if not self._live[row.index] or self._generation[row.index] != row.generation:
            raise LookupError("stale row")
        self._live[row.index] = False
        self._generation[row.index] += 1
        self._next[row.index] = self._head
        self._head = row.index


def admit(rows: RowMap, requests, on_row) -> int:
    admitted = 0
    for req in requests:
        try:
            row = rows.enlist()  # leak: a cancelled request continues past its row
        except LookupError:
            break
        if req.cancelled:
            continue
        on_row(req, row)
        admitted += 1
    return admitted


def dry_run(rows: RowMap, model, req):
    row = rows.enlist()  # clean: struck in finally
    try:
        return model.shape_of(req, row.index)
    finally:
        rows.strike(row)


class SwapDepot:
    """Host copies of preempted sequences. The ticket is what brings them back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: "OrderedDict[str, tuple]" = OrderedDict()
        self._used = 0

    def stow(self, payload: Sequence[bytes]) -> str:
        size = sum(len(p) for p in payload)
        if self._used + size > self._limit:
            raise MemoryError("swap space is full")
        ticket = uuid.uuid4().hex
        self._kept[ticket] = tuple(payload)
        self._used += size
        return ticket

    def bring_back(self, ticket: str) -> tuple:
        payload = self._kept.pop(ticket)
        self._used -= sum(len(p) for p in payload)
        return payload

    def discard(self, ticket: str) -> None:
        self.bring_back(ticket)


class Preemptor:
    def __init__(self, depot: SwapDepot) -> None:
        self.depot = depot
        self.tickets: Dict[str, str] = {}

    def preempt(self, rid: str, payload) -> None:
        self.tickets[rid] = self.depot.stow(payload)  # leak: abort drops the entry without discarding the ticket

    def resume(self, rid: str):
        return self.depot.bring_back(self.tickets.pop(rid))

    def abort(self, rid: str) -> None:
        self.tickets.pop(rid, None)


def migrate(depot: SwapDepot, payload, peer) -> bool:
    ticket = depot.stow(payload)  # clean: near miss, both ways take the copy out again
    if peer.has_room():
        peer.send(depot.bring_back(ticket))
        return True
    depot.discard(ticket)
    return False


class BlockHashMemo:
    """Hashes of token blocks, computed once."""

    def __init__(self, cap: int = 65536) -> None:
        self._known: "OrderedDict[tuple, str]" = OrderedDict()
        self._cap = cap

    def get(self, tokens: tuple) -> str:
        found = self._known.get(tokens)
        if found is None:
            found = hashlib.sha1(repr(tokens).encode()).hexdigest()
            self._known[tokens] = found
            if len(self._known) > self._cap:
                self._known.popitem(last=False)
        return found

    def forget(self, tokens: tuple) -> None:
        self._known.pop(tokens, None)


def same_block(memo: BlockHashMemo, a: tuple, b: tuple) -> bool:
    left = memo.get(a)  # clean: a memo table owns nothing
    if len(a) != len(b):
        return False
    return left == memo.get(b)  # clean: a memo table owns nothing

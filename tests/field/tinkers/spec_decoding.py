"""Speculative decoding at Outrider: draft slots, lookahead, scratch, windows, token trees."""
from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional


class DraftSlots:
    """Slots of the draft model's own cache. Slots are freed several at once after a verify."""

    def __init__(self, n: int) -> None:
        self._parent: List[Optional[int]] = [None] * n
        self._used = bytearray(n)
        self._cursor = 0

    def spawn(self, parent: int = -1) -> int:
        n = len(self._used)
        for step in range(n):
            at = (self._cursor + step) % n
            if not self._used[at]:
                self._used[at] = 1
                self._parent[at] = parent
                self._cursor = at + 1
                return at
        raise IndexError("no draft slot")

    def prune(self, slots: Iterable[int]) -> None:
        for at in slots:
            if not self._used[at]:
                raise ValueError(f"slot {at} is not used")
            self._used[at] = 0
            self._parent[at] = None

    @property
    def in_use(self) -> int:
        return sum(self._used)


def draft_chain(slots: DraftSlots, draft, root: int, depth: int) -> List[int]:
    chain = []
    at = root
    for _ in range(depth):
        at = slots.spawn(at)  # clean: near miss, rebound but every slot is in the returned chain
        chain.append(at)
        if draft.step(at).is_eos:
            break
    return chain


def verify_chain(slots: DraftSlots, target, depth: int) -> int:
    chain = [slots.spawn() for _ in range(depth)]  # leak: only the rejected tail is pruned and the accepted head is forgotten
    accepted = target.verify(chain)
    slots.prune(chain[accepted:])
    return accepted


def verify_once(slots: DraftSlots, target) -> bool:
    at = slots.spawn()  # clean: pruned before the return
    good = target.verify([at]) == 1
    slots.prune([at])
    return good


class Lookahead:
    """KV positions reserved ahead by sequence, either committed or rolled back."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._ahead: Dict[str, int] = {}

    def extend(self, seq: str, k: int) -> bool:
        if k > self._free:
            return False
        self._free -= k
        self._ahead[seq] = self._ahead.get(seq, 0) + k
        return True

    def commit(self, seq: str, accepted: int) -> None:
        ahead = self._ahead.pop(seq)
        self._free += ahead - accepted

    def rollback(self, seq: str) -> None:
        self._free += self._ahead.pop(seq, 0)


def speculate(look: Lookahead, seq: str, k: int, draft, target) -> int:
    if not look.extend(seq, k):  # leak: an empty draft returns 0 without commit or rollback
        return 0
    tokens = draft.propose(seq, k)
    if not tokens:
        return 0
    accepted = target.verify(seq, tokens)
    look.commit(seq, accepted)
    return accepted


def speculate_guarded(look: Lookahead, seq: str, k: int, draft, target) -> int:
    if not look.extend(seq, k):  # clean: committed, or rolled back when the draft fails
        return 0
    try:
        tokens = draft.propose(seq, k)
        accepted = target.verify(seq, tokens)
    except RuntimeError:
        look.rollback(seq)
        return 0
    look.commit(seq, accepted)
    return accepted


class ScratchLogits:
    """A few large float buffers behind a LIFO queue, so that the warmest is used next."""

    def __init__(self, count: int, make) -> None:
        self._q: "queue.LifoQueue" = queue.LifoQueue()
        for _ in range(count):
            self._q.put(make())
        self.misses = 0

    def grab(self, timeout: float = 0.1):
        try:
            return self._q.get(timeout=timeout)
        except queue.Empty:
            self.misses += 1
            raise

    def toss(self, buf) -> None:
        self._q.put(buf)


def sample_batch(scratch: ScratchLogits, model, batch):
    try:
        buf = scratch.grab()  # leak: a batch with a NaN row returns without tossing the buffer
    except queue.Empty:
        return None
    model.logits_into(buf, batch)
    if model.has_nan(buf):
        return None
    picked = model.sample(buf)
    scratch.toss(buf)
    return picked


def rerank(scratch: ScratchLogits, model, groups):
    best = []
    buf = scratch.grab()  # clean: one buffer for all groups, tossed in finally
    try:
        for group in groups:
            if not group:
                continue
            model.logits_into(buf, group)
            best.append(model.argmax(buf))
    finally:
        scratch.toss(buf)
    return best


def two_pass(scratch: ScratchLogits, model, batch):
    draft_buf = scratch.grab()  # leak: no second buffer, then the caught Empty returns with the first
    try:
        target_buf = scratch.grab()  # clean: tossed after the compare
    except queue.Empty:
        return model.single_pass(batch)
    model.compare(draft_buf, target_buf, batch)
    scratch.toss(target_buf)
    scratch.toss(draft_buf)
    return batch


class VerifyWindows:
    """Exclusive spans of the target model's schedule, started and finished by name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: Dict[str, int] = {}
        self._clock = 0
        self._lock = threading.RLock()

    def kick_off(self, name: str) -> None:
        with self._lock:
            if name in self._running:
                raise KeyError(f"{name} runs already")
            if len(self._running) >= self._most:
                raise RuntimeError("no window")
            self._clock += 1
            self._running[name] = self._clock

    def wind_up(self, name: str) -> int:
        with self._lock:
            return self._clock - self._running.pop(name)

    @contextlib.contextmanager
    def window(self, name: str):
        self.kick_off(name)
        try:
            yield self
        finally:
            self.wind_up(name)


def verify_in_window(windows: VerifyWindows, name: str, target, tokens) -> int:
    with windows.window(name):  # clean: wound up by the context manager
        if not tokens:
            return 0
        return target.verify(name, tokens)


def verify_retry(windows: VerifyWindows, name: str, target, tokens) -> Optional[int]:
    for attempt in range(3):
        window = f"{name}/{attempt}"
        windows.kick_off(window)  # leak: a failed attempt goes on to the next name with its window running
        try:
            accepted = target.verify(name, tokens)
        except RuntimeError:
            continue
        windows.wind_up(window)
        return accepted
    return None


@dataclass
class TreeNode:
    grove: "TokenGrove"
    token: int
    parent: Optional["TreeNode"]
    kids: List["TreeNode"] = field(default_factory=list)
    alive: bool = True

    def wither(self) -> None:
        for kid in self.kids:
            if kid.alive:
                kid.wither()
        self.alive = False
        self.grove._reclaim(self)


class TokenGrove:
    """Nodes of draft trees with a bound on their number; a node withers with its subtree."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._live = 0
        self._husks: List[TreeNode] = []

    def sprout(self, token: int, parent: Optional[TreeNode] = None) -> TreeNode:
        if self._live >= self._bound:
            raise OverflowError("grove is full")
        self._live += 1
        node = self._husks.pop() if self._husks else TreeNode(self, 0, None)
        node.token, node.parent, node.kids, node.alive = token, parent, [], True
        if parent is not None:
            parent.kids.append(node)
        return node

    def _reclaim(self, node: TreeNode) -> None:
        self._live -= 1
        self._husks.append(node)


def best_path(grove: TokenGrove, draft, token: int, width: int) -> Optional[List[int]]:
    root = grove.sprout(token)  # leak: no candidate, then None is returned and the root does not wither
    for candidate in draft.top(token, width):
        grove.sprout(candidate, root)  # clean: near miss, a child of the root withers with it
    if not root.kids:
        return None
    path = draft.walk(root)
    root.wither()
    return path


class TreeKeeper:
    def __init__(self, grove: TokenGrove) -> None:
        self.grove = grove
        self.root: Optional[TreeNode] = None

    def replant(self, token: int) -> None:
        if self.root is not None:
            self.root.wither()
        self.root = self.grove.sprout(token)  # clean: the root before withers first, the last in clear

    def clear(self) -> None:
        if self.root is not None:
            self.root.wither()
            self.root = None


class AcceptanceStats:
    """Plain tallies by draft length."""

    def __init__(self) -> None:
        self.opened: Dict[int, int] = {}
        self.accepted = 0

    def open(self, k: int) -> None:
        self.opened[k] = self.opened.get(k, 0) + 1

    def close(self, k: int) -> float:
        return self.accepted / max(1, self.opened.get(k, 0))


def tally(stats: AcceptanceStats, steps) -> None:
    for step in steps:
        stats.open(step.k)  # clean: a statistic, no balance is kept
        if step.rejected:
            continue
        stats.accepted += step.accepted

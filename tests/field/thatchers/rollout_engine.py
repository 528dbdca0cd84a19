"""Batched RL rollout engine: KV slots, adapter pins and reward tickets."""
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Callable, Deque, Dict, List, Optional, Set

logger = logging.getLogger(__name__)


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    SCORING = 2
    DONE = 3
    ABORTED = 4


@dataclass
class Episode:
    uid: str
    prompt: List[int]
    adapter: Optional[str] = None
    budget: int = 128
    status: Status = Status.WAITING
    slot: int = -1
    ticket: int = -1
    tokens: List[int] = field(default_factory=list)
    reward: Optional[float] = None


class KVSlots:
    def __init__(self, n: int):
        self._free: List[int] = list(range(n))[::-1]
        self.lengths = [0] * n

    def grab(self) -> int:
        """Returns -1 when everything is taken."""
        return self._free.pop() if self._free else -1

    def ungrab(self, slot: int) -> None:
        self.lengths[slot] = 0
        self._free.append(slot)


class AdapterTable:
    def __init__(self, max_loaded: int):
        self.max_loaded = max_loaded
        self.pins: Dict[str, int] = {}

    def pin(self, name: str) -> bool:
        if name not in self.pins:
            idle = [k for k, v in self.pins.items() if v == 0]
            if len(self.pins) >= self.max_loaded:
                if not idle:
                    return False
                del self.pins[idle[0]]
            self.pins[name] = 0
        self.pins[name] += 1
        return True

    def unpin(self, name: str) -> None:
        self.pins[name] -= 1


class RewardDesk:
    """The reward model takes a limited number of outstanding requests."""

    def __init__(self, depth: int):
        self.depth = depth
        self.open: Set[int] = set()
        self.scores: Dict[int, float] = {}
        self._n = 0

    def file(self, tokens: List[int]) -> Optional[int]:
        if len(self.open) >= self.depth:
            return None
        self._n += 1
        self.open.add(self._n)
        return self._n

    def settle(self, ticket: int) -> Optional[float]:
        self.open.discard(ticket)
        return self.scores.pop(ticket, None)


class RolloutEngine:
    def __init__(self, slots: KVSlots, adapters: AdapterTable, desk: RewardDesk, decode: Callable[[int, List[int]], int], eos: int):
        self.slots = slots
        self.adapters = adapters
        self.desk = desk
        self.decode = decode
        self.eos = eos
        self.waiting: Deque[Episode] = deque()
        self.running: Dict[str, Episode] = {}
        self.scoring: Dict[str, Episode] = {}

    def admit(self) -> int:
        admitted = 0
        while self.waiting:
            ep = self.waiting[0]
            if ep.adapter is not None and not self.adapters.pin(ep.adapter):  # leak: when no slot is left the head stays queued and is pinned again at the next admit
                break
            slot = self.slots.grab()  # clean: held by the episode until _finish() or abort()
            if slot < 0:
                break
            self.waiting.popleft()
            ep.slot = slot
            ep.status = Status.RUNNING
            self.running[ep.uid] = ep
            admitted += 1
        return admitted

    def admit_one(self, ep: Episode) -> bool:
        slot = self.slots.grab()  # clean: near miss, ungrabbed when the adapter cannot be pinned
        if slot < 0:
            return False
        if ep.adapter is not None and not self.adapters.pin(ep.adapter):  # clean: _finish() and abort() unpin
            self.slots.ungrab(slot)
            return False
        ep.slot, ep.status = slot, Status.RUNNING
        self.running[ep.uid] = ep
        return True

    def step(self) -> None:
        for ep in list(self.running.values()):
            tok = self.decode(ep.slot, ep.prompt + ep.tokens)
            ep.tokens.append(tok)
            self.slots.lengths[ep.slot] += 1
            if tok == self.eos or len(ep.tokens) >= ep.budget:
                self._finish(ep)

    def _finish(self, ep: Episode) -> None:
        del self.running[ep.uid]
        self.slots.ungrab(ep.slot)
        ep.slot = -1
        if ep.adapter is not None:
            self.adapters.unpin(ep.adapter)
        ticket = self.desk.file(ep.tokens)  # leak: abort() of an episode being scored drops it with its ticket open
        if ticket is None:
            ep.status = Status.DONE
            return
        ep.ticket = ticket
        ep.status = Status.SCORING
        self.scoring[ep.uid] = ep

    def collect(self) -> List[Episode]:
        out: List[Episode] = []
        for uid, ep in list(self.scoring.items()):
            if ep.ticket not in self.desk.scores:
                continue
            ep.reward = self.desk.settle(ep.ticket)
            ep.status = Status.DONE
            del self.scoring[uid]
            out.append(ep)
        return out

    def abort(self, uid: str) -> None:
        ep = self.running.pop(uid, None)
        if ep is not None:
            self.slots.ungrab(ep.slot)
            if ep.adapter is not None:
                self.adapters.unpin(ep.adapter)
        else:
            ep = self.scoring.pop(uid, None)
        if ep is not None:
            ep.status = Status.ABORTED

    def fork(self, ep: Episode, n: int) -> List[Episode]:
        children: List[Episode] = []
        for i in range(n):
            slot = self.slots.grab()  # leak: a fork past its token budget is skipped after the slot was taken
            if slot < 0:
                break
            child = Episode(f"{ep.uid}/{i}", ep.prompt, budget=ep.budget - len(ep.tokens), slot=slot)
            if child.budget <= 0:
                continue
            child.status = Status.RUNNING
            self.running[child.uid] = child
            children.append(child)
        return children

    def score_prompt(self, tokens: List[int], timeout: float) -> Optional[float]:
        ticket = self.desk.file(tokens)  # leak: the deadline returns None and leaves the ticket filed
        if ticket is None:
            return None
        deadline = time.monotonic() + timeout
        while ticket not in self.desk.scores:
            if time.monotonic() > deadline:
                logger.warning("reward %d timed out", ticket)
                return None
            time.sleep(0.01)
        return self.desk.settle(ticket)

    def score_many(self, batch: List[List[int]], timeout: float) -> List[Optional[float]]:
        tickets: List[int] = []
        for tokens in batch:
            t = self.desk.file(tokens)  # clean: near miss, whatever was filed is settled below, scored or not
            if t is None:
                break
            tickets.append(t)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(t not in self.desk.scores for t in tickets):
            time.sleep(0.01)
        scores = [self.desk.settle(t) for t in tickets]
        return scores + [None] * (len(batch) - len(scores))

    def greedy(self, prompt: List[int], max_new: int) -> List[int]:
        slot = self.slots.grab()  # clean: near miss, both the eos break and the exhausted loop come to ungrab
        if slot < 0:
            return []
        out: List[int] = []
        for _ in range(max_new):
            out.append(self.decode(slot, prompt + out))
            if out[-1] == self.eos:
                break
        self.slots.ungrab(slot)
        return out

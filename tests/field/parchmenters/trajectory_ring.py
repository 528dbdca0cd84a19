"""Shared-memory trajectory slabs between env workers and the learner."""
from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field
from typing import Callable

import numpy as np


class Slab:
    def __init__(self, sid: int, length: int, obs_dim: int):
        self.sid = sid
        self.obs = np.zeros((length, obs_dim), dtype=np.float32)
        self.act = np.zeros(length, dtype=np.int64)
        self.rew = np.zeros(length, dtype=np.float32)
        self.used = 0
        self.version = 0
        self.readers = 0

    @property
    def full(self) -> bool:
        return self.used == len(self.act)


class SlabShelf:
    """Slabs by id; the lowest id goes first so that the hot ones stay in cache."""

    def __init__(self, n: int, length: int, obs_dim: int):
        self._slabs = [Slab(i, length, obs_dim) for i in range(n)]
        self._heap = list(range(n))
        self._mu = threading.Lock()

    def unshelve(self) -> Slab | None:
        with self._mu:
            if not self._heap:
                return None
            slab = self._slabs[heapq.heappop(self._heap)]  # clean: returned to the caller
        slab.used = 0
        return slab

    def shelve(self, slab: Slab) -> None:
        with self._mu:
            heapq.heappush(self._heap, slab.sid)

    def join_reader(self, slab: Slab) -> Slab:
        with self._mu:
            slab.readers += 1
        return slab

    def leave_reader(self, slab: Slab) -> None:
        with self._mu:
            slab.readers -= 1


class EnvWriter:
    """One per environment thread. Sealed slabs go to the exchange."""

    def __init__(self, shelf: SlabShelf, exchange: "Exchange"):
        self.shelf = shelf
        self.exchange = exchange
        self.cur: Slab | None = None

    def push(self, obs, act: int, rew: float) -> bool:
        if self.cur is not None and self.cur.full:
            self.exchange.seal(self.cur)
            self.cur = None
        if self.cur is None:
            self.cur = self.shelf.unshelve()  # clean: near miss, the full one was sealed, close() shelves this one
            if self.cur is None:
                return False
        i = self.cur.used
        self.cur.obs[i], self.cur.act[i], self.cur.rew[i] = obs, act, rew
        self.cur.used += 1
        return True

    def close(self) -> None:
        if self.cur is not None:
            if self.cur.used:
                self.exchange.seal(self.cur)
            else:
                self.shelf.shelve(self.cur)
            self.cur = None


class EpisodeWriter:
    """One slab per episode, for policies that change between episodes."""

    def __init__(self, shelf: SlabShelf, exchange: "Exchange"):
        self.shelf = shelf
        self.exchange = exchange
        self.cur: Slab | None = None

    def begin(self, version: int) -> bool:
        self.cur = self.shelf.unshelve()  # leak: the slab of an episode whose env crashed is overwritten here
        if self.cur is None:
            return False
        self.cur.version = version
        return True

    def end(self) -> None:
        self.exchange.seal(self.cur)
        self.cur = None

    def run(self, env, policy: Callable, version: int) -> bool:
        if not self.begin(version):
            return False
        obs, finished = env.reset(), False
        while not finished and not self.cur.full:
            act = policy(obs)
            i = self.cur.used
            self.cur.obs[i], self.cur.act[i] = obs, act
            obs, self.cur.rew[i], finished = env.step(act)
            self.cur.used += 1
            if env.crashed:
                return False
        self.end()
        return True


@dataclass
class Batch:
    obs: np.ndarray
    act: np.ndarray
    done: Callable[[], None]


@dataclass
class Draft:
    traj_id: str
    slab: Slab
    truncated: bool = False
    tags: list[str] = field(default_factory=list)


class Exchange:
    """Sealed slabs, kept until the learner has consumed them."""

    def __init__(self, shelf: SlabShelf, keep: int):
        self.shelf = shelf
        self.keep = keep
        self.sealed: list[Slab] = []
        self.drafts: dict[str, Draft] = {}
        self.on_batch: list[Callable[[], None]] = []

    def seal(self, slab: Slab) -> None:
        self.sealed.append(slab)
        while len(self.sealed) > self.keep and self.sealed[0].readers == 0:
            self.shelf.shelve(self.sealed.pop(0))

    def batch(self) -> Batch | None:
        if not self.sealed:
            return None
        slab = self.shelf.join_reader(self.sealed[-1])  # clean: near miss, the batch's done() leaves
        return Batch(slab.obs[:slab.used], slab.act[:slab.used], lambda: self.shelf.leave_reader(slab))

    def mean_reward(self, min_version: int) -> float:
        total, n = 0.0, 0
        for slab in list(self.sealed):
            self.shelf.join_reader(slab)  # leak: slabs of old versions are skipped with the reader still counted
            if slab.version < min_version:
                continue
            total += float(slab.rew[:slab.used].sum())
            n += slab.used
            self.shelf.leave_reader(slab)
        return total / max(n, 1)

    def trimmed(self, slab: Slab) -> Slab | None:
        """Copy without the steps after the last reward."""
        out = self.shelf.unshelve()  # leak: not shelved when the slab holds no reward at all
        if out is None:
            return None
        hits = np.flatnonzero(slab.rew[:slab.used])
        if hits.size == 0:
            return None
        n = int(hits[-1]) + 1
        out.obs[:n], out.act[:n], out.rew[:n] = slab.obs[:n], slab.act[:n], slab.rew[:n]
        out.used, out.version = n, slab.version
        return out

    def replace_trimmed(self, index: int) -> bool:
        out = self.trimmed(self.sealed[index])  # clean: near miss, it goes into self.sealed and the one it replaces is shelved
        if out is None:
            return False
        old, self.sealed[index] = self.sealed[index], out
        self.shelf.shelve(old)
        return True

    def joined(self, a: Slab, b: Slab) -> Slab | None:
        if a.used + b.used > len(a.act):
            return None
        out = self.shelf.unshelve()  # clean: returned to the caller
        if out is None:
            return None
        for part in (a, b):
            i, j = out.used, out.used + part.used
            out.obs[i:j], out.act[i:j], out.rew[i:j] = part.obs[:part.used], part.act[:part.used], part.rew[:part.used]
            out.used = j
        return out

    def compact_pair(self) -> bool:
        if len(self.sealed) < 2:
            return False
        merged = self.joined(self.sealed[0], self.sealed[1])  # leak: neither kept nor shelved when a reader is on one of the pair
        if merged is None:
            return False
        if self.sealed[0].readers or self.sealed[1].readers:
            return False
        for old in self.sealed[:2]:
            self.shelf.shelve(old)
        self.sealed[:2] = [merged]
        return True

    def open_draft(self, traj_id: str) -> Draft | None:
        """A slab for one long trajectory that is filled out of order."""
        if traj_id in self.drafts:
            return self.drafts[traj_id]
        slab = self.shelf.unshelve()  # leak: commit() forgets the draft of a truncated trajectory with its slab
        if slab is None:
            return None
        self.drafts[traj_id] = Draft(traj_id, slab)
        return self.drafts[traj_id]

    def cut_short(self, traj_id: str) -> None:
        self.drafts[traj_id].truncated = True

    def commit(self, traj_id: str) -> bool:
        draft = self.drafts.pop(traj_id)
        if draft.truncated:
            return False
        self.seal(draft.slab)
        return True

    def stage(self, fill: Callable[[Slab], int]) -> bool:
        """Fill a slab now, publish it at the end of the learner's batch."""
        slab = self.shelf.unshelve()  # clean: near miss, the callback seals it or it is shelved
        if slab is None:
            return False
        slab.used = fill(slab)
        if slab.used == 0:
            self.shelf.shelve(slab)
            return False
        self.on_batch.append(lambda: self.seal(slab))
        return True

    def batch_finished(self) -> None:
        callbacks, self.on_batch = self.on_batch, []
        for cb in callbacks:
            cb()


def learner_step(exchange: Exchange, update: Callable[[np.ndarray, np.ndarray], float]) -> float | None:
    batch = exchange.batch()  # clean: done() in finally
    if batch is None:
        return None
    try:
        return update(batch.obs, batch.act)
    finally:
        batch.done()
        exchange.batch_finished()


def evaluate(exchange: Exchange, policy: Callable[[np.ndarray], np.ndarray], min_steps: int) -> float | None:
    batch = exchange.batch()  # leak: a short batch is returned on before done()
    if batch is None or len(batch.act) < min_steps:
        return None
    agree = float((policy(batch.obs) == batch.act).mean())
    batch.done()
    return agree

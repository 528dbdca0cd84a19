"""RL rollout: trajectory buffers shared by actors, learner returns them."""
import collections
import logging
import random
import typing as t

import torch

_log = logging.getLogger("rollout")

Obs = torch.Tensor


class Trajectory:
    __slots__ = ("obs", "rew", "n", "cap")

    def __init__(self, cap: int, dim: int):
        self.obs = torch.zeros(cap, dim)
        self.rew = torch.zeros(cap)
        self.n = 0
        self.cap = cap

    def add(self, o: Obs, r: float) -> bool:
        self.obs[self.n] = o
        self.rew[self.n] = r
        self.n += 1
        return self.n == self.cap


class TrajectoryStore:
    def __init__(self, count: int, cap: int, dim: int):
        self.free: t.Deque[Trajectory] = collections.deque(Trajectory(cap, dim) for _ in range(count))
        self.in_use: t.Set[int] = set()

    def alloc(self) -> Trajectory:
        if not self.free:
            raise MemoryError("trajectories")
        tr = self.free.pop()  # clean: handed out
        self.in_use.add(id(tr))
        return tr

    def dealloc(self, tr: Trajectory) -> None:
        self.in_use.discard(id(tr))
        tr.n = 0
        self.free.append(tr)

    def alloc_n(self, n: int) -> t.List[Trajectory]:
        got: t.List[Trajectory] = []
        for _ in range(n):
            if not self.free:
                raise MemoryError("trajectories")
            got.append(self.alloc())  # leak: running out raises and loses those already taken
        return got

    def alloc_up_to(self, n: int) -> t.List[Trajectory]:
        got: t.List[Trajectory] = []
        while len(got) < n and self.free:
            got.append(self.alloc())  # clean: near miss, a short list is still handed to the caller
        return got


class Actor:
    def __init__(self, store: TrajectoryStore, env, policy):
        self.store = store
        self.env = env
        self.policy = policy
        self.done: "collections.deque[Trajectory]" = collections.deque()

    def episode(self) -> t.Optional[Trajectory]:
        tr = self.store.alloc()  # clean: near miss, the broken episode deallocates, the other is returned
        obs = self.env.reset()
        while True:
            obs, rew, over, broken = self.env.step(self.policy(obs))
            if broken:
                self.store.dealloc(tr)
                return None
            if tr.add(obs, rew) or over:
                return tr

    def collect(self, n: int) -> None:
        for _ in range(n):
            tr = self.episode()  # clean: goes to the done queue that the learner empties
            if tr is not None:
                self.done.append(tr)

    def evaluate(self, n: int) -> float:
        total = 0.0
        for _ in range(n):
            tr = self.episode()  # leak: evaluated and dropped
            if tr is None:
                continue
            total += tr.rew[: tr.n].sum().item()
        return total / max(1, n)

    def evaluate_best(self, n: int) -> t.Optional[Trajectory]:
        best: t.Optional[Trajectory] = None
        for _ in range(n):
            tr = self.episode()  # clean: near miss, the loser of each comparison is deallocated, the winner returned
            if tr is None:
                continue
            if best is None:
                best = tr
            elif tr.rew.sum() > best.rew.sum():
                self.store.dealloc(best)
                best = tr
            else:
                self.store.dealloc(tr)
        return best

    def show_best(self, n: int) -> float:
        tr = self.evaluate_best(n)  # clean: deallocated after the sum
        if tr is None:
            return float("-inf")
        score = tr.rew.sum().item()
        self.store.dealloc(tr)
        return score

    def first_positive(self, n: int) -> t.Optional[Trajectory]:
        for _ in range(n):
            tr = self.episode()  # leak: a trajectory without reward is overwritten by the next round
            if tr is None:
                continue
            if tr.rew.sum() > 0:
                return tr
        return None

    def seed_episode(self, steps: int) -> None:
        tr = self.store.alloc()  # leak: a full trajectory returns from inside the loop before it is queued
        obs = self.env.reset()
        for _ in range(steps):
            obs, rew, over, _ = self.env.step(self.policy(obs))
            if tr.add(obs, rew):
                _log.debug("capacity reached")
                return
            if over:
                break
        self.done.append(tr)


class Learner:
    def __init__(self, store: TrajectoryStore, actors: t.Sequence[Actor], min_len: int = 2):
        self.store = store
        self.actors = actors
        self.min_len = min_len
        self.replay: t.List[Trajectory] = []

    def gather(self) -> None:
        for a in self.actors:
            while a.done:
                self.replay.append(a.done.popleft())

    def step(self) -> float:
        self.gather()
        loss = 0.0
        for tr in self.replay:
            if tr.n >= self.min_len:
                loss += tr.rew[: tr.n].mean().item()
            self.store.dealloc(tr)
        self.replay.clear()
        return loss

    def fill_random(self, n: int) -> None:
        for tr in self.store.alloc_up_to(n):  # clean: into replay, freed in step()
            tr.obs.normal_()
            tr.n = tr.cap
            self.replay.append(tr)

    def bootstrap(self, n: int) -> t.Iterable[Obs]:
        batch = self.store.alloc_n(n)  # leak: only trajectories of the random half are deallocated
        chosen = random.sample(batch, n // 2)
        obs = [c.obs.clone() for c in chosen]
        for c in chosen:
            self.store.dealloc(c)
        return obs

    def dry_run(self, n: int) -> bool:
        batch = self.store.alloc_n(n)  # clean: all deallocated
        ok = len(batch) == n
        while batch:
            self.store.dealloc(batch.pop())
        return ok

"""Environments that belong to a trajectory for several turns."""
from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass

from .farm import Env, EnvFarm


@contextmanager
def guarded_env(farm: EnvFarm, image: str):
    env = farm.check_out(image)  # clean: checked in or scrapped in finally
    if env is None:
        raise RuntimeError(f"no environment for {image}")
    try:
        yield env
    finally:
        if env.healthy():
            farm.check_in(env)
        else:
            farm.scrap(env)


@dataclass
class Session:
    traj_id: str
    env: Env
    touched: float


class SessionTable:
    def __init__(self, farm: EnvFarm, ttl: float = 300.0):
        self.farm = farm
        self.ttl = ttl
        self._open: dict[str, Session] = {}

    def open(self, traj_id: str, image: str) -> Session | None:
        session = self._open.get(traj_id)
        if session is not None:
            session.touched = time.monotonic()
            return session
        env = self.farm.check_out(image)  # leak: expire() pops a busy session and goes on without its environment
        if env is None:
            return None
        session = self._open[traj_id] = Session(traj_id, env, time.monotonic())
        return session

    def get(self, traj_id: str) -> Session | None:
        return self._open.get(traj_id)

    def close(self, traj_id: str, failed: bool = False) -> None:
        session = self._open.pop(traj_id, None)
        if session is None:
            return
        if failed:
            self.farm.scrap(session.env)
        else:
            self.farm.check_in(session.env)

    def expire(self) -> int:
        cutoff = time.monotonic() - self.ttl
        n = 0
        for traj_id in list(self._open):
            if self._open[traj_id].touched > cutoff:
                continue
            session = self._open.pop(traj_id)
            if session.env.busy:
                continue
            self.farm.check_in(session.env)
            n += 1
        return n

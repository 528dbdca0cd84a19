from __future__ import annotations

from typing import Callable

from .farm import Env, EnvFarm
from .sessions import SessionTable, guarded_env

Policy = Callable[[dict], str]


class EpisodeRunner:
    def __init__(self, farm: EnvFarm, sessions: SessionTable, max_turns: int = 32):
        self.farm = farm
        self.sessions = sessions
        self.max_turns = max_turns

    def _play(self, env: Env, policy: Policy, obs: dict) -> float:
        total = 0.0
        for _ in range(self.max_turns):
            obs, reward, done = env.step(policy(obs))
            total += reward
            if done:
                break
        return total

    def run(self, image: str, policy: Policy, seed: int) -> float | None:
        env = self.farm.check_out(image)  # leak: a failed reset returns without check-in or scrap
        if env is None:
            return None
        obs = env.reset(seed)
        if obs is None:
            return None
        try:
            return self._play(env, policy, obs)
        finally:
            self.farm.check_in(env)

    def run_seeds(self, image: str, policy: Policy, seeds: list[int]) -> list[float]:
        totals = []
        with guarded_env(self.farm, image) as env:  # clean: the context manager settles it
            for seed in seeds:
                obs = env.reset(seed)
                if obs is None:
                    return totals
                totals.append(self._play(env, policy, obs))
        return totals

    def turn(self, traj_id: str, action: str) -> tuple[dict, float, bool] | None:
        session = self.sessions.get(traj_id)
        if session is None:
            return None
        session.env.busy = True
        try:
            result = session.env.step(action)
        except ConnectionError:
            self.sessions.close(traj_id, failed=True)
            return None
        session.env.busy = False
        if result[2]:
            self.sessions.close(traj_id)
        return result


class VectorRollout:
    """The same image ``n`` times, stepped together."""

    def __init__(self, farm: EnvFarm, image: str, n: int):
        self.farm = farm
        self.image = image
        self.envs: list[Env] = []
        for _ in range(n):
            env = farm.check_out(image)  # clean: near miss, close() checks all of the list in, also before the raise
            if env is None:
                self.close()
                raise RuntimeError(f"{len(self.envs)} of {n} environments")
            self.envs.append(env)

    def close(self) -> None:
        while self.envs:
            self.farm.check_in(self.envs.pop())

    def restart(self, i: int) -> bool:
        fresh = self.farm.check_out(self.image)  # clean: in self.envs, the one before is scrapped
        if fresh is None:
            return False
        self.farm.scrap(self.envs[i])
        self.envs[i] = fresh
        return True

    def widen(self, n: int, seed: int) -> int:
        """Add environments that pass a reset."""
        added = 0
        while added < n:
            env = self.farm.check_out(self.image)  # leak: an environment that fails its reset is neither kept nor scrapped
            if env is None or env.reset(seed + added) is None:
                break
            self.envs.append(env)
            added += 1
        return added

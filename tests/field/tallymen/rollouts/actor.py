import logging
import threading

from .slots import Timeout

log = logging.getLogger(__name__)


class EnvCrashed(Exception):
    pass


class Actor(threading.Thread):
    def __init__(self, env, policy, ring, versions, horizon=128):
        super().__init__(daemon=True)
        self.env = env
        self.policy = policy
        self.ring = ring
        self.versions = versions
        self.horizon = horizon
        self.halt = threading.Event()
        self.version = versions.pin()  # leak: refresh() puts a newer one over it without unpinning
        self.crashes = 0

    def refresh(self):
        if self.versions.latest > self.version.number:
            self.version = self.versions.pin()  # leak: the next refresh() puts a newer one over it without unpinning

    def run(self):
        while not self.halt.is_set():
            self.refresh()
            try:
                slot = self.ring.begin(timeout=1.0)  # leak: the handler of EnvCrashed begins again with the slot lost
                self._rollout(slot)
            except Timeout:
                continue
            except EnvCrashed:
                self.crashes += 1
                log.warning("env crashed %d times", self.crashes)
                self.env.restart()
                continue
            self.ring.seal(slot, self.version.number)
        self.versions.unpin(self.version)

    def _rollout(self, slot):
        obs = self.env.reset()
        for t in range(self.horizon):
            action = self.policy.act(self.version.weights, obs)
            self.ring.obs[slot, t] = obs
            obs, reward, done = self.env.step(action)
            if obs is None:
                raise EnvCrashed(f"step {t}")
            self.ring.reward[slot, t] = reward
            self.ring.length[slot] = t + 1
            if done:
                return

    def demo(self, actions):
        """Writes a given trajectory, e.g. of a person."""
        slot = self.ring.begin()  # clean: near miss, abandoned or sealed, depending on the flag
        good = False
        try:
            obs = self.env.reset()
            for t, action in enumerate(actions[: self.horizon]):
                self.ring.obs[slot, t] = obs
                obs, reward, done = self.env.step(action)
                if obs is None:
                    return False
                self.ring.reward[slot, t] = reward
                self.ring.length[slot] = t + 1
            good = True
            return True
        finally:
            if good:
                self.ring.seal(slot, self.version.number)
            else:
                self.ring.abandon(slot)

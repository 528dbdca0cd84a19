"""Terminal and browser environments for multi-turn agent training.

Environments are slow to start, so that they are lent out through callbacks:
borrow(cb) calls cb(env) now or when the next one comes home.
"""
import collections
import logging
import threading
import time
import uuid
from functools import partial

log = logging.getLogger("agentgym")


class EnvBroken(Exception):
    pass


class EpisodeAborted(Exception):
    pass


class Env:
    def __init__(self, backend, seed):
        self.env_id = uuid.uuid4().hex[:8]
        self.backend = backend
        self.seed = seed
        self.episodes = 0

    def reset(self, task):
        self.episodes += 1
        obs = self.backend.reset(task, self.seed)
        if obs is None:
            raise EnvBroken(self.env_id)
        return obs

    def step(self, action):
        obs, reward, done = self.backend.step(action)
        if obs is None:
            raise EnvBroken(self.env_id)
        return obs, reward, done


class EnvPool:
    def __init__(self, factory, size):
        self._lock = threading.RLock()
        self._home = [factory(i) for i in range(size)]
        self._waiters = collections.deque()
        self.lent = 0

    def borrow(self, cb):
        with self._lock:
            if not self._home:
                self._waiters.append(cb)
                return False
            env = self._home.pop()  # clean: the callback gets it outside of the lock
            self.lent += 1
        cb(env)
        return True

    def borrow_now(self):
        with self._lock:
            if not self._home:
                return None
            self.lent += 1
            return self._home.pop()  # clean: returned to the caller

    def borrow_fresh(self, max_episodes):
        """An environment that has not collected too much cruft."""
        with self._lock:
            for _ in range(len(self._home)):
                env = self._home.pop()  # leak: worn environments are popped and not put back
                if env.episodes < max_episodes:
                    self.lent += 1
                    return env
        return None

    def bring_back(self, env):
        with self._lock:
            self.lent -= 1
            if not self._waiters:
                self._home.append(env)
                return
            cb = self._waiters.popleft()
            self.lent += 1
        cb(env)


class Episode:
    def __init__(self, policy, task, max_turns=32):
        self.policy = policy
        self.task = task
        self.max_turns = max_turns
        self.messages = []
        self.total = 0.0
        self.env = None

    def attach(self, env):
        self.env = env
        self.messages.append({"role": "user", "content": env.reset(self.task)})

    def detach(self):
        env, self.env = self.env, None
        return env

    def run(self):
        for turn in range(self.max_turns):
            action = self.policy.act(self.messages)
            self.messages.append({"role": "assistant", "content": action})
            if action == "ABORT":
                raise EpisodeAborted(f"turn {turn}")
            obs, reward, done = self.env.step(action)
            self.total += reward
            self.messages.append({"role": "tool", "content": obs})
            if done:
                break
        return self.total


class Runner:
    def __init__(self, pool, policy, sink):
        self.pool = pool
        self.policy = policy
        self.sink = sink
        self.aborted = 0
        self.active = {}

    # ---- simple ways ----

    def run_one(self, task):
        env = self.pool.borrow_now()  # clean: near miss, the episode has it between attach and detach and the finally uses the local name
        if env is None:
            return None
        ep = Episode(self.policy, task)
        try:
            ep.attach(env)
            return ep.run()
        finally:
            ep.detach()
            self.pool.bring_back(env)

    def run_tolerant(self, task):
        env = self.pool.borrow_now()  # leak: EpisodeAborted is caught and returns zero with the environment lent
        if env is None:
            return None
        ep = Episode(self.policy, task)
        try:
            ep.attach(env)
            total = ep.run()
        except EpisodeAborted as e:
            self.aborted += 1
            log.info("aborted: %s", e)
            return 0.0
        except EnvBroken:
            self.pool.bring_back(env)
            raise
        self.pool.bring_back(ep.detach())
        return total

    def run_fresh(self, task, max_episodes=50):
        env = self.pool.borrow_fresh(max_episodes) or self.pool.borrow_now()  # clean: brought back in the finally
        if env is None:
            return None
        try:
            ep = Episode(self.policy, task)
            ep.attach(env)
            return ep.run()
        finally:
            self.pool.bring_back(env)

    # ---- callbacks ----

    def enqueue(self, task, done):
        ep = Episode(self.policy, task)
        self.pool.borrow(partial(self._go, ep, done))  # clean: near miss, _go brings it back on every way out

    def _go(self, ep, done, env):
        try:
            ep.attach(env)
            score = ep.run()
        except (EnvBroken, EpisodeAborted) as e:
            log.warning("%s", e)
            score = None
        finally:
            self.pool.bring_back(env)
        done(ep, score)

    def enqueue_unless_stale(self, task, deadline, done):
        def go(env):
            if time.monotonic() > deadline:
                done(None, None)
                return
            ep = Episode(self.policy, task)
            ep.env = env
            self._go(ep, done, env)

        self.pool.borrow(go)  # leak: after the deadline the callback returns without bringing it back

    # ---- stepping many at once ----

    def open_episode(self, key, task):
        env = self.pool.borrow_now()  # leak: EnvBroken of attach() is caught and returns False, the episode is in no table yet
        if env is None:
            return False
        ep = Episode(self.policy, task)
        try:
            ep.attach(env)
        except EnvBroken as e:
            log.error("reset failed: %s", e)
            return False
        old = self.active.pop(key, None)
        if old is not None:
            self.pool.bring_back(old.detach())
        self.active[key] = ep
        return True

    def tick(self):
        for key, ep in list(self.active.items()):
            action = self.policy.act(ep.messages)
            try:
                obs, reward, done = ep.env.step(action)
            except EnvBroken:
                done, reward, obs = True, 0.0, ""
            ep.total += reward
            ep.messages.append({"role": "tool", "content": obs})
            if done:
                self.close_episode(key)

    def close_episode(self, key):
        ep = self.active.pop(key)
        self.pool.bring_back(ep.detach())
        self.sink.append((ep.messages, ep.total))

    def race(self, task, n):
        """n environments, the first that is solved wins."""
        envs = []
        while len(envs) < n:
            env = self.pool.borrow_now()  # clean: all of the list is brought back, also when it is short
            if env is None:
                break
            envs.append(env)
        try:
            for env in envs:
                ep = Episode(self.policy, task)
                ep.attach(env)
                if ep.run() > 0:
                    return ep
            return None
        finally:
            for env in envs:
                self.pool.bring_back(env)

    def shutdown(self):
        for key in list(self.active):
            self.close_episode(key)

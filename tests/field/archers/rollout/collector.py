import queue
import threading

from .envs import EnvCrashed


class Trajectory:
    def __init__(self, version):
        self.version = version
        self.steps = []
        self.reward = 0.0


class Collector(threading.Thread):
    """Plays episodes with the newest weights that it has seen and hands the trajectories to the learner."""

    def __init__(self, envs, store, policy, out):
        super().__init__(daemon=True)
        self.envs = envs
        self.store = store
        self.policy = policy
        self.out = out
        self.crashes = 0
        self._halt = threading.Event()

    def halt(self):
        self._halt.set()

    def run(self):
        version = self.store.acquire()  # clean: near miss, released when a newer one is taken and by the finally
        try:
            while not self._halt.is_set():
                if self.store.current.number > version.number:
                    newer = self.store.acquire()  # clean: takes the place of the one that is released
                    self.store.release(version)
                    version = newer
                self.play(version)
        finally:
            self.store.release(version)

    def play(self, version, max_steps=64):
        env = self.envs.checkout()  # leak: a crash is counted but the environment is neither checked in nor replaced
        trajectory = Trajectory(version)
        try:
            observation = env.reset()
            for _ in range(max_steps):
                action = self.policy(version.buffer, observation)
                observation, reward, done = env.step(action)
                trajectory.steps.append((observation, action))
                trajectory.reward += reward
                if done:
                    break
        except EnvCrashed:
            self.crashes += 1
            return
        self.envs.checkin(env)
        trajectory.version = self.store.acquire(version)  # leak: the learner drops trajectories that are too old without releasing their version
        self.out.put(trajectory)

    def evaluate(self, episodes):
        version = self.store.acquire()  # clean: released by the finally
        total = 0.0
        try:
            for _ in range(episodes):
                env = self.envs.checkout()  # clean: near miss, replaced after a crash and checked in otherwise
                try:
                    total += env.run(lambda obs: self.policy(version.buffer, obs))
                except EnvCrashed:
                    self.envs.replace(env)
                    continue
                self.envs.checkin(env)
            return total / max(episodes, 1)
        finally:
            self.store.release(version)


class Learner:
    def __init__(self, store, inbox, update, max_lag=2):
        self.store = store
        self.inbox = inbox
        self.update = update
        self.max_lag = max_lag
        self.stale = 0

    def step(self, batch_size):
        batch = []
        while len(batch) < batch_size:
            try:
                trajectory = self.inbox.get(timeout=5.0)
            except queue.Empty:
                break
            if self.store.current.number - trajectory.version.number > self.max_lag:
                self.stale += 1
                continue
            batch.append(trajectory)
        if not batch:
            return False
        self.update(batch)
        for trajectory in batch:
            self.store.release(trajectory.version)
        return self.store.publish(self.store.current.number + 1, self.fill)

    def fill(self, buffer):
        self.update.copy_to(buffer)

"""RL fine-tuning: rollout workers, environment leases, sample groups and weight versions."""
import threading
from collections import defaultdict, deque
from contextlib import contextmanager


class EnvFarm:
    def __init__(self, envs):
        self._idle = deque(envs)
        self._lock = threading.Lock()

    def hire(self):
        with self._lock:  # clean: the with statement releases the lock
            return self._idle.popleft() if self._idle else None

    def dismiss(self, env):
        with self._lock:  # clean: the with statement releases the lock
            self._idle.append(env)

    @contextmanager
    def visiting(self):
        env = self.hire()  # clean: near miss, dismissed in finally after the yield
        try:
            yield env
        finally:
            if env is not None:
                self.dismiss(env)


class WeightStore:
    """Keeps a version of the weights in memory as long as somebody reads it."""

    def __init__(self):
        self.readers = defaultdict(int)
        self.latest = 0

    def subscribe(self, version):
        self.readers[version] += 1
        return version

    def unsubscribe(self, version):
        self.readers[version] -= 1
        if not self.readers[version] and version != self.latest:
            del self.readers[version]


class Episode:
    def __init__(self, eid, prompt):
        self.eid = eid
        self.prompt = prompt
        self.env = None
        self.judge = None
        self.version = None
        self.actions = []
        self.reward = 0.0

    @property
    def length(self):
        return len(self.actions)


class Worker:
    def __init__(self, farm: EnvFarm, judges: EnvFarm, weights: WeightStore, max_steps=64):
        self.farm = farm
        self.judges = judges
        self.weights = weights
        self.max_steps = max_steps
        self.live = {}
        self.version = weights.subscribe(weights.latest)  # clean: near miss, refresh swaps it, stop drops it

    def refresh(self):
        """Follows the trainer to the newest weights between episodes."""
        newer = self.weights.subscribe(self.weights.latest)  # clean: near miss, older one unsubscribed below
        self.weights.unsubscribe(self.version)
        self.version = newer

    def start(self, eid, prompt, judged):
        if eid in self.live:
            return False
        ep = Episode(eid, prompt)
        ep.env = self.farm.hire()  # clean: near miss, step's end, truncate and stop all go through _retire
        if ep.env is None:
            return False
        if judged:
            ep.judge = self.judges.hire()  # leak: _retire dismisses the environment and keeps the judge
        ep.version = self.weights.subscribe(self.version)  # leak: truncate drops the episode still subscribed
        ep.env.reset(prompt)
        self.live[eid] = ep
        return True

    def step(self, eid, policy):
        ep = self.live[eid]
        action = policy(ep.prompt, ep.actions, ep.version)
        reward, over = ep.env.step(action)
        ep.actions.append(action)
        ep.reward += reward
        if ep.judge is not None:
            ep.reward += ep.judge.score(ep.actions)
        if over:
            self._retire(eid)
            self.weights.unsubscribe(ep.version)
            return ep.reward
        if ep.length >= self.max_steps:
            return self.truncate(eid)
        return None

    def _retire(self, eid):
        ep = self.live.pop(eid)
        self.farm.dismiss(ep.env)
        ep.env = None
        return ep

    def truncate(self, eid):
        ep = self._retire(eid)
        return ep.reward

    def stop(self):
        for eid in list(self.live):
            ep = self._retire(eid)
            self.weights.unsubscribe(ep.version)
        self.weights.unsubscribe(self.version)


class GroupSampler:
    """GRPO groups: the members of one prompt are rolled out in their own environments."""

    def __init__(self, farm: EnvFarm, weights: WeightStore, group=8):
        self.farm = farm
        self.weights = weights
        self.group = group
        self.groups = {}
        self.reference = {}

    def form(self, prompt_id):
        if prompt_id in self.groups:
            return len(self.groups[prompt_id])
        members = []
        while len(members) < self.group:
            env = self.farm.hire()  # leak: prune drops all but the best with their environments
            if env is None:
                break
            members.append({"env": env, "score": 0.0, "tokens": []})
        self.groups[prompt_id] = members
        return len(members)

    def advance(self, prompt_id, policy):
        for m in self.groups[prompt_id]:
            token = policy(prompt_id, m["tokens"])
            m["tokens"].append(token)
            m["score"] += m["env"].step(token)[0]

    def prune(self, prompt_id, keep):
        ranked = sorted(self.groups[prompt_id], key=lambda m: m["score"], reverse=True)
        self.groups[prompt_id] = ranked[:keep]
        return ranked[keep - 1]["score"] if ranked else 0.0

    def dissolve(self, prompt_id):
        members = self.groups.pop(prompt_id)
        for m in members:
            self.farm.dismiss(m["env"])
        return [m["tokens"] for m in members]

    def set_reference(self, prompt_id, version):
        self.reference[prompt_id] = self.weights.subscribe(version)  # leak: a later version overwrites it

    def drop_reference(self, prompt_id):
        if prompt_id in self.reference:
            self.weights.unsubscribe(self.reference.pop(prompt_id))


class ReplayWindow:
    """Last episodes kept with the environment that can replay them, oldest out first."""

    def __init__(self, farm: EnvFarm, size):
        self.farm = farm
        self.size = size
        self.kept = deque()
        self.pinned = deque(maxlen=size)

    def keep(self, tokens):
        env = self.farm.hire()  # clean: near miss, the oldest is dismissed here and the rest by empty
        if env is None:
            return False
        self.kept.append((env, tokens))
        if len(self.kept) > self.size:
            old, _ = self.kept.popleft()
            self.farm.dismiss(old)
        return True

    def pin(self, tokens):
        env = self.farm.hire()  # leak: the bounded deque lets its oldest entry fall out undismissed
        if env is None:
            return False
        env.reset(tokens)
        self.pinned.append(env)
        return True

    def empty(self):
        while self.kept:
            self.farm.dismiss(self.kept.pop()[0])
        while self.pinned:
            self.farm.dismiss(self.pinned.pop())


def smoke_test(farm: EnvFarm, prompt):
    with farm.visiting() as env:  # clean: the context manager dismisses it
        if env is None:
            return None
        env.reset(prompt)
        return env.step("noop")

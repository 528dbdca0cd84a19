import logging
import queue
import threading

from .envpool import ResetFailed
from .storage import RingFull

log = logging.getLogger(__name__)


class Episode:
    def __init__(self, pool, env, lease, block, obs):
        self.pool = pool
        self.env = env
        self.lease = lease
        self.block = block
        self.obs = obs
        self.why = None

    def finish(self):
        self.pool.checkin(self.env)
        self.lease.release()
        return self.block

    def truncate(self, why):
        """Ends it early; what was written so far is used all the same."""
        self.why = why
        self.pool.checkin(self.env)
        return self.block


class Collector(threading.Thread):
    def __init__(self, tasks, envs, board, ring, policy, learner, max_turns=20):
        super().__init__(daemon=True)
        self.tasks = tasks
        self.envs = envs
        self.board = board
        self.ring = ring
        self.policy = policy
        self.learner = learner
        self.max_turns = max_turns
        self.failures = 0

    def _begin(self, task):
        env = self.envs.checkout_for(task.domain)  # leak: ResetFailed is counted in run(), where env is not known
        obs = env.reset(task)
        lease = self.board.lease()  # leak: truncate() checks in the environment and leaves the lease alone
        if lease is None:
            self.envs.checkin(env)
            return None
        try:
            block = self.ring.take(task.task_id)  # leak: the learner skips a group without variance and does not give its blocks
        except RingFull:
            lease.release()
            self.envs.checkin(env)
            return None
        return Episode(self.envs, env, lease, block, obs)

    def _play(self, episode):
        for turn in range(self.max_turns):
            ids, logps = self.policy.act(episode.obs, episode.lease.slots[0])
            if not episode.block.write(ids, logps):
                return episode.truncate("block is full")
            episode.obs, reward, done = episode.env.step(ids)
            episode.block.reward += reward
            if done:
                return episode.finish()
        return episode.truncate("turns")

    def run(self):
        while True:
            try:
                task = self.tasks.get(timeout=1.0)
            except queue.Empty:
                continue
            if task is None:
                return
            try:
                episode = self._begin(task)  # clean: near miss, None is no episode, and _play ends each of the others
            except ResetFailed as exc:
                self.failures += 1
                log.warning("%s", exc)
                continue
            if episode is None:
                self.tasks.put(task)
                continue
            self.learner.ingest(self._play(episode))


def evaluate(tasks, envs, board, policy):
    """Mean reward; nothing is stored."""
    total, ran = 0.0, 0
    for task in tasks:
        lease = board.lease(2)  # clean: near miss, no lease ends the loop, and the finally covers a failed reset
        if lease is None:
            break
        env = envs.checkout()  # clean: checked in by the finally
        try:
            obs, done = env.reset(task), False
            while not done:
                obs, reward, done = env.step(policy.act(obs, lease.slots[0])[0])
                total += reward
            ran += 1
        except ResetFailed:
            log.info("%s left out", task.task_id)
        finally:
            envs.checkin(env)
            lease.release()
    return total / max(1, ran)

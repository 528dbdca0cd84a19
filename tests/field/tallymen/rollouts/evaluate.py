import contextlib
import logging

log = logging.getLogger(__name__)


@contextlib.contextmanager
def weights_of(versions, number=None):
    v = versions.pin(number)  # clean: unpinned in the finally
    try:
        yield v.weights
    finally:
        versions.unpin(v)


def mean_return(versions, policy, env, episodes):
    with weights_of(versions) as weights:  # clean: left with the block
        total = 0.0
        for _ in range(episodes):
            obs, done = env.reset(), False
            while not done:
                obs, reward, done = env.step(policy.act(weights, obs))
                if obs is None:
                    return float("nan")
                total += reward
        return total / episodes


def duel(versions, old, referee):
    """Compares a version with the latest one."""
    a = versions.pin(old)  # leak: equal numbers return before the try
    b = versions.pin()  # leak: equal numbers return before the try
    if a.number == b.number:
        return 0.5
    try:
        return referee(a.weights, b.weights)
    finally:
        versions.unpin(a)
        versions.unpin(b)


def export_async(versions, executor, write):
    v = versions.pin()  # clean: near miss, the callback of the future unpins, whatever its outcome
    fut = executor.submit(write, v.number, v.weights)
    fut.add_done_callback(lambda _: versions.unpin(v))
    return fut


class BestKeeper:
    """Pins the best version so far."""

    def __init__(self, versions):
        self.versions = versions
        self.best = None
        self.score = float("-inf")

    def offer(self, score):
        if score <= self.score:
            return False
        if self.best is not None:
            self.versions.unpin(self.best)
        self.best = self.versions.pin()  # clean: near miss, the one before was unpinned
        self.score = score
        log.info("best is %d now", self.best.number)
        return True

    def close(self):
        if self.best is not None:
            self.versions.unpin(self.best)
            self.best = None

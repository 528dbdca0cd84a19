"""The learner takes committed rows, updates, publishes weights; and evaluation next to it."""
import asyncio
import contextlib
import logging
import math

from .envs import EnvDead

log = logging.getLogger("rollout.learner")


class Diverged(Exception):
    pass


class Learner:
    def __init__(self, arena, weights, update, batch=32):
        self.arena = arena
        self.weights = weights
        self.update = update
        self.batch = batch
        self.steps = 0
        self.reference = None

    async def take(self):
        """A batch of rows; they are free()d by whoever takes them."""
        rows = []
        while len(rows) < self.batch:
            rows.append(await self.arena.committed.get())  # clean: returned to the caller
        return rows

    async def step(self):
        rows = await self.take()  # leak: Diverged is raised with the batch's rows in hand, and fit() handles it
        loss, params = self.update(self.arena.data[rows], self.arena.used[rows])
        if not math.isfinite(loss):
            raise Diverged(f"loss {loss} at step {self.steps}")
        for row in rows:
            self.arena.free(row)
        self.steps += 1
        self.weights.publish(params)
        return loss

    async def fit(self, steps):
        for _ in range(steps):
            try:
                loss = await self.step()
            except Diverged as exc:
                log.warning("%s; batch dropped", exc)
                continue
            if self.steps % 100 == 0:
                log.info("step %d loss %.4f", self.steps, loss)

    async def peek_loss(self):
        """Loss of the next batch without an update; the rows go back to the queue."""
        rows = await self.take()  # clean: near miss, requeued and not freed, so the next take() finds them
        try:
            loss, _ = self.update(self.arena.data[rows], self.arena.used[rows])
            return loss
        finally:
            self.arena.requeue(rows)

    def set_reference(self):
        """Freeze the current version as the reference of the KL term."""
        fresh = self.weights.hold()  # clean: near miss, the former reference is let go, close() lets go of the last
        if self.reference is not None:
            self.weights.let_go(self.reference)
        self.reference = fresh

    def close(self):
        if self.reference is not None:
            self.weights.let_go(self.reference)
            self.reference = None


@contextlib.contextmanager
def frozen(weights):
    version = weights.hold()  # clean: let go in finally
    try:
        yield weights.params(version)
    finally:
        weights.let_go(version)


async def evaluate(envs, weights, policy, episodes):
    """Mean return of the current policy."""
    total, n = 0.0, 0
    with frozen(weights) as params:  # clean: with block
        while n < episodes:
            try:
                async with envs.session() as handle:  # clean: break and continue leave through the with
                    ret = await handle.env.run(lambda obs: policy(params, obs))
                    if ret is None:
                        continue
                    total += ret
                    n += 1
            except EnvDead as exc:
                log.warning("evaluation goes on without: %s", exc)
                break
    return total / max(1, n)

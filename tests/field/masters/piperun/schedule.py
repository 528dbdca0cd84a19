"""Orders of forwards and backwards."""
import logging

from .link import PeerGone
from .stage import Stage

logger = logging.getLogger("pipe.schedule")


def one_f_one_b(stage: Stage, batches, targets, rank: int, world: int, tap_every=0) -> bool:
    n = len(batches)
    warm = min(world - rank - 1, n)
    f = b = 0
    try:
        for _ in range(warm):
            stage.forward(f, batches[f], targets[f], tap=tap_every and f % tap_every == 0)
            f += 1
        while f < n:
            if stage.prev is not None and f + 1 < n:
                stage.prev.post(f"f{f + 1}")
            stage.forward(f, batches[f], targets[f])
            f += 1
            stage.backward(b)
            b += 1
        while b < n:
            stage.backward(b)
            b += 1
    except PeerGone as e:
        logger.error("step given up after %d/%d: %s", f, b, e)
        stage.abort()
        return False
    return True


def gpipe(stage: Stage, batches, targets) -> float:
    """All forwards, then all backwards in reverse."""
    for i, (x, t) in enumerate(zip(batches, targets)):
        stage.forward(i, x, t)
    for i in sorted(stage.stash, reverse=True):
        stage.backward(i)
    for link in (stage.prev, stage.nxt):
        if link is not None:
            link.reap(block=True)
    logger.debug("%d micro-batches, %d buffers out", len(batches), stage.pool.out)
    losses, stage.losses = stage.losses, []
    return sum(losses) / max(1, len(losses))


def evaluate(stage: Stage, batches, metric) -> float:
    tot, n = 0.0, 0
    keep = None
    for i, x in enumerate(batches):
        y = stage.infer(i, x, len(x))
        if y is None:
            continue
        if keep is None:
            keep = stage.pool.checkout(y.shape, "first")  # leak: on the last stage the first output is kept and not recycled if there are few batches
            keep.data.copy_(y)
        tot += metric(y, keep.data)
        n += 1
    if n < 2:
        logger.info("nothing to compare with")
        return 0.0
    stage.pool.recycle(keep)
    return tot / n

"""Schedules micro-batches through a stage."""
import logging

from .comm import PeerGone
from .slots import Credits
from .stage import Stage, StageFault

log = logging.getLogger("pp.driver")


def outputs(stage: Stage, feed, keep=False):
    """Yields (micro-batch, output); whoever iterates drops the output."""
    for mb, embeds in feed:
        try:
            y = stage.forward(mb, embeds, keep)  # clean: goes out with the yield
        except StageFault as fault:
            log.error("%s", fault)
            continue
        yield mb, y


def run(stage: Stage, feed, budget: Credits, cost, on_logits=None):
    """All micro-batches of a step. Returns the numbers of those that went through."""
    through = []
    for mb, embeds in feed:
        if not budget.take(cost, timeout=5.0):  # leak: a StageFault ends the loop with the units of this micro-batch taken
            log.warning("no budget for %d", mb)
            continue
        try:
            y = stage.forward(mb, embeds, keep=True)  # clean: near miss, pass_on() or emit() drops it
        except (StageFault, PeerGone) as exc:
            log.error("step cut short: %s", exc)
            break
        if stage.last:
            emit(y, on_logits)
        else:
            stage.pass_on(y)
        stage.finish(mb)
        budget.put(cost)
        through.append(mb)
    return through


def emit(y, on_logits):
    try:
        if on_logits is not None:
            on_logits(y.mb, y.buf)
    finally:
        y.unref()


def rerun(stage: Stage, mbs, on_logits):
    """After a swap of the layers."""
    for mb in mbs:
        y = stage.recompute(mb)  # clean: None or dropped by emit()
        if y is None:
            continue
        emit(y, on_logits)


def score(stage: Stage, feed, threshold):
    """Micro-batches whose mean activation is above the threshold."""
    hot = []
    for mb, y in outputs(stage, feed):  # leak: the continue for a quiet micro-batch comes before the unref
        mean = float(y.buf.mean())
        if mean <= threshold:
            continue
        hot.append(mb)
        y.unref()
    return hot

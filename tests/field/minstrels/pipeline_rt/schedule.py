"""1F1B and the forward-only schedule."""
import json
import logging

from .channel import PeerGone
from .slots import NoSlot

log = logging.getLogger("pipe.schedule")


def run_1f1b(stage, depth, position, batches, loss_fn=None, trace_path=None):
    """One optimizer step. Returns the losses of the microbatches on the last stage."""
    trace = open(trace_path, "a") if trace_path else None  # leak: the handler of PeerGone and NoSlot returns before the close
    warm = min(len(batches), depth - position - 1)
    losses, todo = [], []

    def fwd(mb):
        stage.load(mb, batches[mb] if position == 0 else None)
        y = stage.forward(mb)
        if loss_fn is not None:
            losses.append(loss_fn(y, mb) / len(batches))
        todo.append(mb)
        if trace:
            trace.write(json.dumps(["f", mb]) + "\n")

    def bwd():
        mb = todo.pop(0)
        stage.backward(mb, losses[mb] if loss_fn is not None else None)
        if trace:
            trace.write(json.dumps(["b", mb]) + "\n")

    try:
        for mb in range(warm):
            fwd(mb)
        for mb in range(warm, len(batches)):
            fwd(mb)
            bwd()
        while todo:
            bwd()
    except (PeerGone, NoSlot) as e:
        log.error("step abandoned: %s", e)
        stage.forget()
        return None
    if trace:
        trace.close()
    return [float(x.detach()) for x in losses]


def run_eval(stage, position, batches, metric):
    """Forward only; the inputs are let go at the end of the pass."""
    out = []
    try:
        for mb, batch in enumerate(batches):
            stage.load(mb, batch if position == 0 else None)
            y = stage.forward(mb)
            if stage.right is None:
                out.append(metric(y, mb))
    except (PeerGone, NoSlot) as e:
        log.warning("evaluation cut short: %s", e)
    finally:
        stage.forget()
    return out


def dump_slots(stage, path, count):
    """Copies of up to `count` free slots' memory, for debugging stale reads."""
    held = []
    for i in range(count):
        s = stage.pool.claim_or_none(-1)  # clean: collected and unclaimed in the loop below
        if s is None:
            break
        held.append(s)
    blobs = [s.data.flatten()[:16].tolist() for s in held]
    for s in held:
        stage.pool.unclaim(s)
    with open(path, "w") as f:  # clean: with
        json.dump(blobs, f)
    return len(blobs)

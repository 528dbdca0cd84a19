"""What one rank does with one microbatch."""
import logging

import torch

from .slots import NoSlot

log = logging.getLogger("pipe.stage")


class Stage:
    def __init__(self, module, pool, left, right):
        self.module = module
        self.pool = pool
        self.left, self.right = left, right
        self.inputs = {}
        self.outputs = {}
        self.grad_slot = None
        self.skipped = set()

    def load(self, mb, batch=None):
        """Brings the input of a microbatch into a slot: from the batch or from the left neighbour."""
        slot = self.pool.claim(mb)  # clean: near miss, goes to inputs, backward or forget unclaim it, a lost peer unclaims here
        if batch is not None:
            slot.data.copy_(batch)
        else:
            try:
                self.left.recv(slot.data)
            except Exception:
                self.pool.unclaim(slot)
                raise
        self.inputs[mb] = slot

    def forward(self, mb):
        x = self.inputs[mb].data.detach().requires_grad_()
        y = self.module(x)
        self.inputs[mb].grad = x
        self.outputs[mb] = y
        if self.right is not None:
            out = self.pool.claim(mb)  # leak: a failed wait in the channel thread does not call then()
            out.data.copy_(y.detach())
            self.right.send(out.data, lambda: self.pool.unclaim(out))
        return y

    def backward(self, mb, loss=None):
        slot = self.inputs.pop(mb)
        y = self.outputs.pop(mb)
        try:
            if loss is not None:
                loss.backward()
            else:
                g = self._grad_target(mb)
                self.right.recv(g.data)
                y.backward(g.data)
            if self.left is not None:
                self.left.send(slot.grad.grad, lambda: None)
        finally:
            self.pool.unclaim(slot)

    def _grad_target(self, mb):
        """The slot for incoming gradients is claimed once and serves all microbatches."""
        if self.grad_slot is None:
            self.grad_slot = self.pool.claim(mb)  # clean: kept on self, close() unclaims it
        return self.grad_slot

    def replay(self, mb, batch):
        """Runs a microbatch again with the same input after a NaN."""
        slot = self.pool.claim_or_none(mb)  # leak: a microbatch without a loaded input returns False with the slot claimed
        if slot is None:
            raise NoSlot("replay of %d" % mb)
        if mb not in self.inputs:
            log.warning("microbatch %d is not here any more", mb)
            return False
        slot.data.copy_(batch)
        self.pool.unclaim(self.inputs[mb])
        self.inputs[mb] = slot
        self.forward(mb)
        return True

    def forget(self):
        for slot in self.inputs.values():
            self.pool.unclaim(slot)
        self.inputs.clear()
        self.outputs.clear()

    def close(self):
        self.forget()
        if self.grad_slot is not None:
            self.pool.unclaim(self.grad_slot)
            self.grad_slot = None


def measure(stage, shape_ok, rounds=3):
    """Seconds per forward with random input. Runs before training, so slots are free."""
    slot = stage.pool.claim_or_none(-1)  # clean: the finally unclaims it on the early return as well
    if slot is None:
        return None
    try:
        if not shape_ok(slot.data.shape):
            return None
        slot.data.normal_()
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(rounds):
            stage.module(slot.data)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / rounds / 1000
    finally:
        stage.pool.unclaim(slot)

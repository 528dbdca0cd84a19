"""Host offload of activations, gradients and optimizer state."""
from __future__ import annotations

import collections
import itertools

import torch


class HostBuffersFull(RuntimeError):
    pass


class HostBuffers:
    def __init__(self, numel, count):
        self._idle = [torch.empty(numel, pin_memory=True) for _ in range(count)]

    def alloc(self):
        if not self._idle:
            raise HostBuffersFull
        return self._idle.pop()

    def free(self, buf):
        self._idle.append(buf)


class SavedTensorOffload:
    """Pack and unpack hooks for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, buffers):
        self.buffers = buffers
        self.ids = itertools.count()
        self.packed = {}

    def pack(self, tensor):
        key = next(self.ids)
        buf = self.buffers.alloc()  # clean: near miss, every pack has its own key and unpack or end_step frees it
        buf[:tensor.numel()].copy_(tensor.flatten(), non_blocking=True)
        self.packed[key] = (buf, tensor.shape)
        return key

    def unpack(self, key):
        buf, shape = self.packed.pop(key)
        out = buf[:shape.numel()].view(shape).to("cuda")
        self.buffers.free(buf)
        return out

    def end_step(self):
        for buf, _ in self.packed.values():
            self.buffers.free(buf)
        self.packed.clear()


class ModuleInputOffload:
    """Offloads the input of each checkpointed module, for its recomputation."""

    def __init__(self, buffers):
        self.buffers = buffers
        self.inputs = {}

    def pre_forward(self, module, args):
        buf = self.buffers.alloc()  # leak: a module that is called twice in a forward overwrites its entry (by meaning)
        buf[:args[0].numel()].copy_(args[0].flatten())
        self.inputs[module] = buf

    def pre_backward(self, module):
        buf = self.inputs.pop(module, None)
        if buf is None:
            return None
        out = buf.to("cuda")
        self.buffers.free(buf)
        return out


class StageQueue:
    def __init__(self, buffers):
        self.buffers = buffers
        self.queue = collections.deque()

    def push(self, act):
        buf = self.buffers.alloc()  # clean: popped in order by the backward, flush frees what is left
        buf[:act.numel()].copy_(act.flatten())
        self.queue.append((buf, act.shape))

    def pop(self):
        buf, shape = self.queue.popleft()
        out = buf[:shape.numel()].view(shape).to("cuda")
        self.buffers.free(buf)
        return out

    def flush(self):
        while self.queue:
            self.buffers.free(self.queue.popleft()[0])


class HostGradAccumulator:
    def __init__(self, buffers):
        self.buffers = buffers
        self.grads = {}

    def accumulate(self, name, grad):
        buf = self.grads.get(name)
        if buf is None:
            buf = self.grads[name] = self.buffers.alloc()  # leak: zero_grad with set_to_none clears the table
            buf.zero_()
        buf[:grad.numel()] += grad.flatten().cpu()

    def zero_grad(self, set_to_none=True):
        if set_to_none:
            self.grads.clear()
        else:
            for buf in self.grads.values():
                buf.zero_()


class ScaledStep:
    """Unscales on the host; a step with overflow is skipped."""

    def __init__(self, buffers, optimizer):
        self.buffers = buffers
        self.optimizer = optimizer
        self.staged = []

    def step(self, params, scale):
        self.staged = []
        for param in params:
            buf = self.buffers.alloc()  # leak: an overflow returns early and the next step begins with a new list
            buf[:param.grad.numel()].copy_(param.grad.flatten() / scale)
            self.staged.append(buf)
        if not all(torch.isfinite(buf).all() for buf in self.staged):
            return False
        self.optimizer(params, self.staged)
        for buf in self.staged:
            self.buffers.free(buf)
        self.staged = []
        return True


class OptimizerStateSwapper:
    def __init__(self, buffers, read, write):
        self.buffers = buffers
        self.read = read
        self.write = write
        self.current = None
        self.following = None

    def _load(self, group):
        buf = self.buffers.alloc()  # clean: handed on to the caller
        self.read(group, buf)
        return buf

    def run(self, groups, update):
        self.current = self._load(groups[0])  # clean: near miss, freed in the loop before the following one moves into the field
        for idx, group in enumerate(groups):
            if idx + 1 < len(groups):
                self.following = self._load(groups[idx + 1])  # clean: near miss, becomes the current one and is freed in the next turn
            update(group, self.current)
            self.write(group, self.current)
            self.buffers.free(self.current)
            self.current, self.following = self.following, None


class EmaSwap:
    """Puts averaged weights into the model for an evaluation."""

    def __init__(self, buffers, model):
        self.buffers = buffers
        self.model = model
        self.ema = {n: buffers.alloc() for n, _ in model.named_parameters()}  # clean: allocated once for the life of the training
        self.backup = {}

    def enter(self):
        for name, param in self.model.named_parameters():
            self.backup[name] = self.buffers.alloc()  # leak: leave skips the frozen parameters and drops their backups
            self.backup[name][:param.numel()].copy_(param.data.flatten())
            param.data.copy_(self.ema[name][:param.numel()].view_as(param))

    def leave(self):
        for name, param in self.model.named_parameters():
            if not param.requires_grad:
                continue
            buf = self.backup[name]
            param.data.copy_(buf[:param.numel()].view_as(param))
            self.buffers.free(buf)
        self.backup = {}


class LossHistory:
    def __init__(self, buffers, length):
        self.buffers = buffers
        self.ring = [None] * length
        self.at = 0

    def record(self, losses):
        old = self.ring[self.at]
        buf = self.buffers.alloc() if old is None else old  # clean: near miss, a filled place of the ring is used again
        buf[:losses.numel()].copy_(losses)
        self.ring[self.at] = buf
        self.at = (self.at + 1) % len(self.ring)

    def close(self):
        for buf in self.ring:
            if buf is not None:
                self.buffers.free(buf)
        self.ring = [None] * len(self.ring)

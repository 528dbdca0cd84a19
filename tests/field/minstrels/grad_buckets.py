"""Bucketed gradient all-reduce that overlaps with the backward pass.

Hooks on the parameters fill buckets; a full bucket borrows a flat communication slot, copies its gradients
there and starts the reduction. finalize() waits, copies back and retires the slots.
"""
import collections
import logging
import threading

import torch
import torch.distributed as dist

log = logging.getLogger("buckets")


class SlotsBusy(RuntimeError):
    pass


class CommSlot:
    def __init__(self, index, flat):
        self.index, self.flat = index, flat
        self.work = self.bucket = None


class SlotRing:
    def __init__(self, count, numel, dtype, device):
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._free = collections.deque(CommSlot(i, torch.zeros(numel, dtype=dtype, device=device)) for i in range(count))
        self.numel = numel

    def borrow(self):
        with self._freed:
            while not self._free:
                self._freed.wait()
            return self._free.popleft()  # clean: handed to the caller

    def borrow_now(self):
        with self._lock:
            if not self._free:
                raise SlotsBusy("all slots are in flight")
            return self._free.popleft()  # clean: handed to the caller

    def retire(self, slot):
        slot.work = slot.bucket = None
        with self._freed:
            self._free.append(slot)
            self._freed.notify()

    def replace_dtype(self, dtype):
        """Between training phases, when nothing is in flight."""
        with self._lock:
            for _ in range(len(self._free)):
                slot = self._free.popleft()  # leak: a slot that has the dtype already is passed over and not put back
                if slot.flat.dtype == dtype:
                    continue
                slot.flat = slot.flat.to(dtype)
                self._free.append(slot)


class Bucket:
    def __init__(self, index, params):
        self.index, self.params = index, params
        self.reset()

    def reset(self):
        self.left = len(self.params)
        self.slot = None


def make_buckets(params, cap_numel):
    buckets, cur, size = [], [], 0
    for p in reversed(list(params)):
        if not p.requires_grad:
            continue
        if cur and size + p.numel() > cap_numel:
            buckets.append(Bucket(len(buckets), cur))
            cur, size = [], 0
        cur.append(p)
        size += p.numel()
    if cur:
        buckets.append(Bucket(len(buckets), cur))
    return buckets


class Reducer:
    def __init__(self, params, ring, group, cap_numel=1 << 24):
        self.ring, self.group = ring, group
        self.world = dist.get_world_size(group)
        self.buckets = make_buckets(params, cap_numel)
        self.in_flight = []
        self.enabled = True
        self.hooks, self.of = [], {}
        for b in self.buckets:
            for p in b.params:
                self.of[p] = b
                self.hooks.append(p.register_post_accumulate_grad_hook(self._on_grad))  # clean: near miss, removed in detach()

    def _on_grad(self, p):
        b = self.of[p]
        if b.slot is None:
            b.slot = self.ring.borrow()  # leak: a bucket that never fills loses the slot in reset(), in finalize and skip_step
            b.slot.bucket = b
        b.left -= 1
        if b.left == 0 and self.enabled:
            self._launch(b)

    def _launch(self, b):
        off = 0
        for q in b.params:
            n = q.numel()
            b.slot.flat[off:off + n].copy_(q.grad.reshape(-1))
            off += n
        b.slot.flat[:off].div_(self.world)
        b.slot.work = dist.all_reduce(b.slot.flat[:off], group=self.group, async_op=True)
        self.in_flight.append(b.slot)

    def _copy_back(self, slot):
        off = 0
        for q in slot.bucket.params:
            n = q.numel()
            q.grad.copy_(slot.flat[off:off + n].view_as(q))
            off += n

    def finalize(self):
        """After backward(). Returns the number of buckets that were reduced."""
        done = len(self.in_flight)
        for slot in self.in_flight:
            slot.work.wait()
            self._copy_back(slot)
            self.ring.retire(slot)
        self.in_flight = []
        for b in self.buckets:
            b.reset()
        return done

    def skip_step(self):
        """The loss scaler found an overflow: wait for what is on the wire and forget the gradients."""
        for slot in self.in_flight:
            slot.work.wait()
            self.ring.retire(slot)
        self.in_flight.clear()
        for b in self.buckets:
            b.reset()

    def detach(self):
        for h in self.hooks:
            h.remove()
        self.hooks.clear()


def broadcast_buffers(ring, group, buffers, src=0):
    """Module buffers (running statistics) in as few messages as the slots allow."""
    slot = ring.borrow()  # clean: near miss, flushed in the loop any number of times but retired once
    pending, off = [], 0

    def flush():
        if pending:
            dist.broadcast(slot.flat[:off], src, group=group)
            for buf, o in pending:
                buf.copy_(slot.flat[o:o + buf.numel()].view_as(buf))
            pending.clear()

    for buf in buffers:
        if buf.numel() > ring.numel:
            dist.broadcast(buf, src, group=group)
            continue
        if off + buf.numel() > ring.numel:
            flush()
            off = 0
        slot.flat[off:off + buf.numel()].copy_(buf.reshape(-1))
        pending.append((buf, off))
        off += buf.numel()
    flush()
    ring.retire(slot)


def reduce_scalar_async(ring, group, value, on_value):
    slot = ring.borrow()  # leak: the NaN return in finish comes before the retire
    slot.flat[0] = value
    work = dist.all_reduce(slot.flat[:1], group=group, async_op=True)

    def finish(fut):
        v = float(slot.flat[0]) / dist.get_world_size(group)
        if v != v:
            log.error("metric is NaN on some rank")
            return
        ring.retire(slot)
        on_value(v)

    work.get_future().then(finish)


def grad_norm(ring, group, params):
    try:
        slot = ring.borrow_now()  # clean: near miss, the else branch of the try owns it and has a finally
    except SlotsBusy:
        total = torch.zeros(1)
        for p in params:
            total += p.grad.float().pow(2).sum().cpu()
        dist.all_reduce(total, group=group)
    else:
        try:
            acc = slot.flat[:1]
            acc.zero_()
            for p in params:
                acc += p.grad.pow(2).sum()
            dist.all_reduce(acc, group=group)
            total = acc.float().cpu()
        finally:
            ring.retire(slot)
    return float(total.sqrt())


def exchange_halves(ring, group, tensor, peer):
    """Swaps halves with a peer. False where there are not two slots left at the moment."""
    try:
        send = ring.borrow_now()  # leak: when only one slot is free the second borrow raises and send is not retired
        recv = ring.borrow_now()  # clean: retired below
    except SlotsBusy:
        return False
    half = tensor.numel() // 2
    send.flat[:half].copy_(tensor.reshape(-1)[half:])
    reqs = [dist.isend(send.flat[:half], peer, group), dist.irecv(recv.flat[:half], peer, group)]
    for r in reqs:
        r.wait()
    tensor.reshape(-1)[half:].copy_(recv.flat[:half])
    ring.retire(send)
    ring.retire(recv)
    return True


class NormProbe:
    def __init__(self, ring):
        self.ring, self.slot = ring, None

    def start(self):
        if self.slot is None:
            self.slot = self.ring.borrow()  # clean: near miss, kept on self, stop() retires it, start() twice is harmless

    def record(self, i, value):
        self.slot.flat[i] += value

    def stop(self):
        if self.slot is not None:
            self.ring.retire(self.slot)
            self.slot = None


def train_step(model, reducer, batch, scaler, optimizer, probe_loss):
    loss = model(batch)
    scaler.scale(loss).backward()  # hooks fire here
    if not torch.isfinite(loss):
        reducer.skip_step()
        return None
    reducer.finalize()
    reduce_scalar_async(reducer.ring, reducer.group, float(loss.detach()), probe_loss)
    scaler.step(optimizer)
    return loss.detach()

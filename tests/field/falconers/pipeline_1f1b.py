"""One pipeline stage under the 1F1B schedule.

Boundary activations and gradients live in fixed slots, allocated once, so that the
memory of a stage does not depend on the number of micro batches.
"""
import collections
import contextlib
import logging

import torch
import torch.distributed as dist

log = logging.getLogger("pipe")


class SlotError(RuntimeError):
    pass


class SlotPool:
    def __init__(self, count, shape, dtype=torch.bfloat16, device="cuda"):
        self.slots = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
        self.free = collections.deque(range(count))
        self.tags = {}

    def grab(self, tag):
        if not self.free:
            raise SlotError("no slot for %s, held: %s" % (tag, sorted(map(str, self.tags.values()))))
        index = self.free.popleft()  # clean: returned to the caller
        self.tags[index] = tag
        return index

    def grab_many(self, count, tag):
        got = []
        while len(got) < count:
            if not self.free:
                for index in got:
                    self.drop(index)
                raise SlotError("%d slots wanted for %s" % (count, tag))
            index = self.free.popleft()  # clean: near miss, all are dropped when there are not enough
            self.tags[index] = tag
            got.append(index)
        return got

    def drop(self, index):
        del self.tags[index]
        self.free.append(index)

    def tensor(self, index):
        return self.slots[index]

    @contextlib.contextmanager
    def hold(self, tag):
        index = self.grab(tag)  # clean: dropped in the finally
        try:
            yield self.slots[index]
        finally:
            self.drop(index)


class Stage:
    def __init__(self, module, rank, world, pool, loss_fn=None):
        self.module = module
        self.rank = rank
        self.world = world
        self.pool = pool
        self.loss_fn = loss_fn
        self.inputs = {}       # micro batch -> slot of its input
        self.results = {}      # micro batch -> output tensor with its graph
        self.sending = {}      # micro batch -> (slot, request)
        self.posted = None     # (micro batch, slot, request) received ahead
        self.skipped = []
        self.losses = []
        self.grad_slot = pool.grab("grad out")  # clean: belongs to the stage and is dropped in close()

    @property
    def first(self):
        return self.rank == 0

    @property
    def last(self):
        return self.rank == self.world - 1

    def _recv(self, mb):
        if self.posted is not None and self.posted[0] == mb:
            _, index, req = self.posted
            self.posted = None
            req.wait()
            return index
        index = self.pool.grab(("in", mb))  # clean: returned to the caller
        dist.recv(self.pool.tensor(index), src=self.rank - 1)
        return index

    def post(self, mb):
        """Receive the next input while the current one is computed."""
        if self.posted is not None and self.posted[0] == mb:
            return
        index = self.pool.grab(("in", mb))  # leak: a receive posted for another micro batch is overwritten
        req = dist.irecv(self.pool.tensor(index), src=self.rank - 1)
        self.posted = (mb, index, req)

    def forward_one(self, mb, batch=None):
        if self.first:
            x = batch
        else:
            index = self._recv(mb)  # clean: near miss, in the table until backward_one or abort drops it
            self.inputs[mb] = index
            x = self.pool.tensor(index).detach().requires_grad_()
        out = self.module(x)
        self.results[mb] = (x, out)
        if self.last:
            self.losses.append(self.loss_fn(out, mb))
        else:
            self._send(mb, out)

    def _send(self, mb, out):
        index = self.pool.grab(("out", mb))  # leak: abort() empties this table without dropping the slots
        self.pool.tensor(index).copy_(out)
        req = dist.isend(self.pool.tensor(index), dst=self.rank + 1)
        self.sending[mb] = (index, req)

    def reap(self, wait=False):
        for mb in list(self.sending):
            index, req = self.sending[mb]
            if wait:
                req.wait()
            elif not req.is_completed():
                continue
            del self.sending[mb]
            self.pool.drop(index)

    def backward_one(self, mb):
        x, out = self.results.pop(mb)
        if self.last:
            self.losses[mb].backward()
        else:
            grad = self.pool.grab(("grad", mb))  # leak: a micro batch with a bad gradient returns with the slot held
            dist.recv(self.pool.tensor(grad), src=self.rank + 1)
            if not torch.isfinite(self.pool.tensor(grad)).all():
                self.skipped.append(mb)
                self._drop_input(mb)
                return False
            torch.autograd.backward(out, self.pool.tensor(grad))
            self.pool.drop(grad)
        if not self.first:
            self.pool.tensor(self.grad_slot).copy_(x.grad)
            dist.send(self.pool.tensor(self.grad_slot), dst=self.rank - 1)
        self._drop_input(mb)
        return True

    def _drop_input(self, mb):
        index = self.inputs.pop(mb, None)
        if index is not None:
            self.pool.drop(index)

    def step(self, batches):
        """Returns the mean loss on the last stage, None elsewhere or after a failure."""
        count = len(batches)
        warm = min(count, self.world - self.rank - 1)
        self.losses.clear()
        try:
            for mb in range(warm):
                self.forward_one(mb, batches[mb])
            for mb in range(warm, count):
                self.forward_one(mb, batches[mb])
                self.reap()
                self.backward_one(mb - warm)
            for mb in range(count - warm, count):
                self.backward_one(mb)
        except SlotError as exc:
            log.error("stage %d: %s", self.rank, exc)
            self.abort()
            return None
        self.reap(wait=True)
        if not self.last:
            return None
        return sum(float(loss) for loss in self.losses) / count

    def abort(self):
        for mb in list(self.inputs):
            self._drop_input(mb)
        if self.posted is not None:
            self.posted[2].wait()
            self.pool.drop(self.posted[1])
            self.posted = None
        for _, req in self.sending.values():
            req.wait()
        self.sending.clear()
        self.results.clear()

    @torch.no_grad()
    def evaluate(self, count):
        total = 0.0
        for mb in range(count):
            index = self._recv(mb)  # clean: dropped at the end of the round
            out = self.module(self.pool.tensor(index))
            if self.last:
                total += float(self.loss_fn(out, mb))
            else:
                dist.send(out, dst=self.rank + 1)
            self.pool.drop(index)
        return total

    @torch.no_grad()
    def compare(self, other, mb):
        mine = self._recv(mb)  # clean: the handler drops it when there is no second slot
        try:
            theirs = self.pool.grab(("cmp", mb))  # clean: dropped after the difference
        except SlotError:
            self.pool.drop(mine)
            return None
        self.pool.tensor(theirs).copy_(other(self.pool.tensor(mine)))
        diff = (self.module(self.pool.tensor(mine)) - self.pool.tensor(theirs)).abs().max()
        self.pool.drop(theirs)
        self.pool.drop(mine)
        return float(diff)

    def drift(self, mbs):
        kept = []
        for mb in mbs:
            kept.append(self._recv(mb))  # leak: the pairwise loop drops every slot except for the last
        diffs = []
        for left, right in zip(kept, kept[1:]):
            diffs.append(float((self.pool.tensor(left) - self.pool.tensor(right)).norm()))
            self.pool.drop(left)
        return diffs

    def exchange(self, peer, tensor):
        """Swap one activation with a peer; None when the peer has nothing."""
        mine, theirs = self.pool.grab_many(2, "exchange")  # leak: the answer "empty" drops only one of the two
        self.pool.tensor(mine).copy_(tensor)
        flag = torch.zeros(1, device="cuda")
        dist.send(self.pool.tensor(mine), dst=peer)
        dist.recv(flag, src=peer)
        self.pool.drop(mine)
        if not flag.item():
            return None
        dist.recv(self.pool.tensor(theirs), src=peer)
        result = self.pool.tensor(theirs).clone()
        self.pool.drop(theirs)
        return result

    def warm_up(self, rounds):
        slots = self.pool.grab_many(2, "warm up")  # clean: both dropped in the finally
        try:
            for _ in range(rounds):
                self.pool.tensor(slots[1]).copy_(self.module(self.pool.tensor(slots[0])))
        finally:
            for index in slots:
                self.pool.drop(index)

    def probe_link(self):
        with self.pool.hold("probe") as x:  # clean: the with statement drops it
            x.zero_()
            dist.broadcast(x, src=0)

    def close(self):
        self.abort()
        self.pool.drop(self.grad_slot)

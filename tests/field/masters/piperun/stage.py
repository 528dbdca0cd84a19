"""Forward and backward of one stage, and the stash in between."""
import logging

import torch

from .buffers import Act, ActPool
from .link import Link, PeerGone

logger = logging.getLogger("pipe.stage")


class Stage:
    def __init__(self, module, pool: ActPool, prev: Link | None, nxt: Link | None, loss_fn=None):
        self.module, self.pool, self.prev, self.nxt, self.loss_fn = module, pool, prev, nxt, loss_fn
        self.stash: dict[int, tuple[Act, torch.Tensor]] = {}
        self.taps: list[Act] = []
        self.losses: list[float] = []

    def _input(self, mb: int, batch) -> Act:
        if self.prev is not None:
            return self.prev.recv(f"f{mb}")  # clean: returned
        act = self.pool.checkout(batch.shape, f"f{mb}")  # clean: returned
        act.data.copy_(batch)
        return act

    def forward(self, mb: int, batch, target=None, tap=False) -> None:
        x = self._input(mb, batch)  # leak: backward() takes it out of the stash before a receive that may raise PeerGone, and abort() does not see it
        x.data.requires_grad_()
        y = self.module(x.data)
        self.stash[mb] = (x, y)
        if tap:
            self.taps.append(self.pool.retain(x))  # leak: clear_taps() empties the list without a recycle
        if self.nxt is None:
            loss = self.loss_fn(y, target)
            self.losses.append(loss.item())
            self.stash[mb] = (x, loss)
            return
        out = self.pool.checkout(y.shape, f"y{mb}")  # clean: near miss, send() takes it over and reap() recycles it
        out.data.copy_(y.detach())
        self.nxt.send(out)

    def backward(self, mb: int) -> None:
        x, y = self.stash.pop(mb)
        if self.nxt is None:
            y.backward()
        else:
            g = self.nxt.recv(f"b{mb}")  # clean: recycled below
            y.backward(g.data)
            self.pool.recycle(g)
        if self.prev is not None:
            gx = self.pool.checkout(x.data.shape, f"g{mb}")  # clean: send() takes it over
            gx.data.copy_(x.data.grad)
            self.prev.send(gx)
        x.data.grad = None
        self.pool.recycle(x)

    def clear_taps(self) -> dict:
        """Statistics of the tapped inputs since last time."""
        stats = {a.tag: (a.data.mean().item(), a.data.std().item()) for a in self.taps}
        self.taps.clear()
        return stats

    def infer(self, mb: int, batch, rows: int):
        """Forward only. The last stage returns the output, all others None."""
        try:
            x = self._input(mb, batch)  # leak: where there is a next stage we return after the send without recycling the input
        except PeerGone as e:
            logger.error("micro-batch %d: %s", mb, e)
            return None
        if rows < x.data.shape[0]:
            x = self.pool.reshape(x, (rows, *x.data.shape[1:]))  # leak: the same for the smaller one
        with torch.no_grad():
            y = self.module(x.data)
        if self.nxt is not None:
            out = self.pool.checkout(y.shape, f"i{mb}")  # clean: send() takes it over
            out.data.copy_(y)
            self.nxt.send(out)
            return None
        self.pool.recycle(x)
        return y

    def replay(self, mb: int, batch, tol=1e-3) -> bool:
        """Run a stashed micro-batch again and compare, to find flaky hardware."""
        x, y = self.stash[mb]
        ref = self.pool.checkout(y.shape, "replay")  # clean: recycled in the finally
        try:
            ref.data.copy_(y.detach())
            return bool((self.module(x.data) - ref.data).abs().max() < tol)
        finally:
            self.pool.recycle(ref)

    def abort(self) -> None:
        while self.stash:
            _, (x, _y) = self.stash.popitem()
            self.pool.recycle(x)
        for link in (self.prev, self.nxt):
            if link is not None:
                link.cancel()

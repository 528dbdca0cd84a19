import logging

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class WeightSender:
    def __init__(self, model, store, channels, src=0):
        self.model = model
        self.store = store
        self.channels = channels
        self.src = src
        self.sending = {}

    def snapshot(self):
        """Publishes the present weights; None when no copy is free."""
        flat = self.store.compose()  # clean: scrapped or published
        if flat is None:
            return None
        at = 0
        for p in self.model.parameters():
            if at + p.numel() > flat.numel():
                self.store.scrap(flat)
                raise ValueError("model is larger than the flat copy")
            flat[at : at + p.numel()].copy_(p.detach().view(-1))
            at += p.numel()
        return self.store.publish(flat)

    def snapshot_ema(self, decay):
        flat = self.store.compose()  # leak: without a known version it returns None before scrap
        if flat is None:
            return None
        if self.store.latest < 0:
            return None
        v = self.store.open(self.store.latest)  # clean: shut before the publication
        torch.mul(v.flat, decay, out=flat)
        at = 0
        for p in self.model.parameters():
            flat[at : at + p.numel()].add_(p.detach().view(-1).cpu(), alpha=1 - decay)
            at += p.numel()
        self.store.shut(v)
        return self.store.publish(flat)

    def begin(self, no):
        ch = self.channels.tune_in(timeout=10.0)  # clean: in sending until settle()
        if ch is None:
            return False
        v = self.store.open(no)  # clean: in sending until settle()
        work = dist.broadcast(v.flat, self.src, group=ch.group, async_op=True)
        self.sending[ch.no] = (ch, v, work)
        return True

    def settle(self):
        while self.sending:
            _, (ch, v, work) = self.sending.popitem()
            work.wait()
            self.store.shut(v)
            self.channels.tune_out(ch)

    def push(self, no, tries=3):
        """Synchronous broadcast with retries."""
        v = self.store.open(no)  # clean: near miss, shut once behind all tries
        sent = False
        for k in range(tries):
            ch = self.channels.tune_in(timeout=1.0 + k)  # leak: a failed broadcast marks ch broken and goes on without tune_out
            if ch is None:
                continue
            try:
                dist.broadcast(v.flat, self.src, group=ch.group)
            except RuntimeError as e:
                log.warning("channel %d: %s", ch.no, e)
                ch.broken = True
                continue
            self.channels.tune_out(ch)
            sent = True
            break
        self.store.shut(v)
        return sent

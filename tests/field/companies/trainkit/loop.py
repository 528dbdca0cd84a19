import logging

from .buffers import FlatBufferPool, TrackedClient

logger = logging.getLogger(__name__)


class TrainLoop:
    def __init__(self, cfg, model, data):
        self.cfg = cfg
        self.model = model
        self.data = data
        self.client = TrackedClient(FlatBufferPool(cfg.numel, cfg.buffers))
        self.ema = self.client.fetch() if cfg.ema else None  # clean: near miss, finish() hands in whatever is tracked

    def accumulate(self, grads):
        acc = self.client.fetch()  # clean: near miss, handed in by name on both ways
        acc.zero_()
        for g in grads:
            if g is None:
                self.client.hand_in(acc)
                return None
            acc[: g.numel()].add_(g.view(-1))
        out = acc.clone()
        self.client.hand_in(acc)
        return out

    def finish(self):
        self.client.hand_in_all()

    def evaluate(self, batches):
        pool = self.client.pool
        buf = pool.checkout()  # leak: no batch, and the return comes before the checkin
        if buf is None:
            raise RuntimeError("no buffer for the evaluation")
        losses = []
        for b in batches:
            buf[: b.numel()].copy_(b.view(-1))
            losses.append(float(self.model(buf)))
        if not losses:
            logger.warning("nothing to evaluate")
            return 0.0
        pool.checkin(buf)
        return sum(losses) / len(losses)

    def tune(self, trials):
        pool = self.client.pool
        best = None
        for lr in trials:
            buf = pool.checkout()  # leak: the buffer of a best trial that is beaten later is overwritten
            buf.fill_(lr)
            loss = float(self.model(buf))
            if best is None or loss < best[0]:
                best = (loss, buf)
            else:
                pool.checkin(buf)
        if best is not None:
            pool.checkin(best[1])
        return best[0] if best else None

    def tune_best(self, trials):
        pool = self.client.pool
        best = None
        for lr in trials:
            buf = pool.checkout()  # clean: near miss, the beaten one is checked in before it is replaced
            buf.fill_(lr)
            loss = float(self.model(buf))
            if best is None:
                best = (loss, buf)
            elif loss < best[0]:
                pool.checkin(best[1])
                best = (loss, buf)
            else:
                pool.checkin(buf)
        if best is not None:
            pool.checkin(best[1])
        return best[0] if best else None

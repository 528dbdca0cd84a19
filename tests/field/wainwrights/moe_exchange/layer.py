import torch
from torch import nn

from .exchange import Exchange
from .router import Router
from .windows import WindowShortage


class ExpertLayer(nn.Module):
    def __init__(self, experts, router: Router, exchange: Exchange, ranks):
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.router, self.exchange, self.ranks = router, exchange, list(ranks)

    def forward(self, x):
        plan = self.router.plan(x, self.ranks, want_spare=self.training)  # clean: None holds nothing and the finally disposes of the rest
        if plan is None:
            return x
        try:
            transfers = self.exchange.send_plan(x, plan)
            local = x[plan.rows[self.exchange.rank]]
            out = torch.zeros_like(x)
            out[plan.rows[self.exchange.rank]] = sum(e(local) for e in self.experts)
            self.exchange.wait_all(transfers)
        finally:
            plan.dispose(self.router.pool)
        return out

    @torch.no_grad()
    def dry_run(self, x):
        plan = self.router.plan(x, self.ranks, want_spare=False)  # leak: with nothing dropped it returns before dispose()
        if plan is None:
            return -1
        if plan.dropped == 0:
            return 0
        dropped = plan.dropped
        plan.dispose(self.router.pool)
        return dropped

    def gather_expert(self, peer, index):
        pool = self.router.pool
        w = pool.open()  # clean: near miss, closed by the handler as well as after the loop
        parts = []
        try:
            for piece in range(self.exchange.net.pieces(peer, index)):
                w.rows = self.exchange.net.read(peer, w.index, w.tensor)
                if w.rows == 0:
                    raise WindowShortage("piece %d of expert %d is empty" % (piece, index))
                parts.append(w.get().clone())
        except WindowShortage:
            pool.close(w)
            return None
        pool.close(w)
        return torch.cat(parts)

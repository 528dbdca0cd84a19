"""Ring transport: one send and one receive in flight at a time."""
from typing import List, Optional

import torch
import torch.distributed as dist

from .pools import EventBox, RowPool, Rows


class Hop:
    def __init__(self, outgoing: Rows, incoming: Rows, reqs: list):
        self.outgoing = outgoing
        self.incoming = incoming
        self.reqs = reqs

    def land(self) -> Rows:
        """Drops the transport's hold on what was sent; what came in belongs to the caller."""
        for r in self.reqs:
            r.wait()
        self.outgoing.decref()
        return self.incoming


class RingLink:
    def __init__(self, pool: RowPool, events: EventBox, prev: int, nxt: int):
        self.pool = pool
        self.events = events
        self.prev = prev
        self.nxt = nxt

    def hop(self, rows: Rows) -> Optional[Hop]:
        out = rows.incref()  # leak: no buffer for the incoming rows returns with the extra reference
        inc = self.pool.fresh()  # clean: in the Hop, land() passes it on
        if inc is None:
            return None
        reqs = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, out.t, self.nxt),
            dist.P2POp(dist.irecv, inc.t, self.prev),
        ])
        inc.valid = rows.valid
        return Hop(out, inc, reqs)

    def settle(self, side: torch.cuda.Stream) -> bool:
        """Makes the current stream wait for the side stream."""
        ev = self.events.draw("settle")  # clean: put in both branches
        if ev is None:
            side.synchronize()
            return True
        ev.record(side)
        if ev.query():
            self.events.put(ev)
            return True
        torch.cuda.current_stream().wait_event(ev)
        self.events.put(ev)
        return False


def gather_rows(pool: RowPool, parts: List[torch.Tensor]) -> List[Rows]:
    """As many as fit, in order."""
    got: List[Rows] = []
    for p in parts:
        r = pool.fresh_copy(p)  # clean: near miss, the caller owns the list, also a short one
        if r is None:
            break
        got.append(r)
    return got

"""Token dispatch of a mixture-of-experts layer under a capacity budget and per-expert send tickets."""
from collections import defaultdict
from functools import partial


class Capacity:
    """A counter of token places. take() grants all or nothing."""

    def __init__(self, total):
        self.total = total
        self.left = total

    def take(self, n):
        if n > self.left:
            return 0
        self.left -= n
        return n

    def refund(self, n):
        self.left += n


class Tickets:
    """One ticket allows one send in flight to an expert's rank."""

    def __init__(self, ranks, per_rank):
        self._free = {r: list(range(per_rank)) for r in ranks}

    def pull(self, rank):
        return (rank, self._free[rank].pop()) if self._free[rank] else None

    def hand_back(self, ticket):
        rank, number = ticket
        self._free[rank].append(number)


class Dispatcher:
    def __init__(self, capacity, tickets, comm, policy="drop"):
        self.capacity = capacity
        self.tickets = tickets
        self.comm = comm
        self.policy = policy
        self.on_done = []
        self.last_loads = {}
        self.dropped = defaultdict(int)

    def dispatch(self, hidden, plan):
        """Send each expert its tokens; what was sent is settled by settle()."""
        handles = []
        loads = {expert: len(index) for expert, index in plan.items()}
        mean = sum(loads.values()) / max(len(loads), 1)
        hot = [expert for expert, load in loads.items() if load > 2 * mean]
        for expert in sorted(plan, key=lambda e: loads[e]):
            index = plan[expert]
            if not len(index):
                continue
            if expert in hot and self.policy == "drop":
                keep = int(2 * mean)
                self.dropped[expert] += len(index) - keep
                index = index[:keep]
            granted = self.capacity.take(len(index))  # clean: near miss, refunded by the callback or on each refusal
            if not granted:
                self.dropped[expert] += len(index)
                continue
            ticket = self.tickets.pull(expert.rank)  # clean: near miss, the callback hands it back
            if ticket is None:
                self.capacity.refund(granted)
                self.dropped[expert] += len(index)
                continue
            rows = hidden.index_select(0, index)
            if expert.scale is not None:
                rows = rows * expert.scale
            if rows.shape[0] % expert.multiple:
                missing = expert.multiple - rows.shape[0] % expert.multiple
                pad = self.capacity.take(missing)  # clean: near miss, 0 when refused, refunded by its callback
                if pad:
                    rows = expert.pad(rows, missing)
                    self.on_done.append(lambda n=pad: self.capacity.refund(n))
            handles.append((expert, index, self.comm.send(expert.rank, rows)))
            self.on_done.append(partial(self.capacity.refund, granted))
            self.on_done.append(lambda t=ticket: self.tickets.hand_back(t))
        self.last_loads = loads
        return handles

    def settle(self, handles):
        received = []
        for expert, index, handle in handles:
            received.append((expert, index, handle.wait()))
        callbacks, self.on_done = self.on_done, []
        for callback in callbacks:
            callback()
        return received

    def route_overflow(self, hidden, expert, index, siblings):
        """Try to place tokens that their own expert has no room for."""
        want = len(index)
        if want == 0:
            return None
        near = [s for s in siblings if s.node == expert.node]
        siblings = near + [s for s in siblings if s.node != expert.node]
        match self.policy:
            case "drop":
                self.dropped[expert] += want
                return None
            case "spill":
                places = self.capacity.take(want)  # leak: when no sibling has a ticket, the places are not refunded
                if places == 0:
                    return None
                for sibling in siblings:
                    if (ticket := self.tickets.pull(sibling.rank)) is not None:  # clean: near miss, handed back below
                        break
                else:
                    self.dropped[expert] += want
                    return None
                out = self.comm.send(sibling.rank, hidden.index_select(0, index)).wait()
                self.tickets.hand_back(ticket)
                self.capacity.refund(places)
                return out
            case "halve":
                places = self.capacity.take(want // 2)  # leak: this case sends and returns without a refund
                if places == 0:
                    return None
                kept, rest = index[:places], index[places:]
                self.dropped[expert] += len(rest)
                return expert.forward_local(hidden.index_select(0, kept))
            case "local":
                places = self.capacity.take(want)  # clean: near miss, refunded under the same condition
                out = expert.forward_local(hidden.index_select(0, index))
                if places:
                    self.capacity.refund(places)
                return out
        raise ValueError(self.policy)

    def broadcast_shared(self, hidden, ranks, chunk):
        """Send the shared-expert rows to every rank, chunk by chunk, then the remainder."""
        total = hidden.shape[0]
        full = total - total % chunk
        sent = 0
        for rank in ranks:
            ticket = self.tickets.pull(rank)  # leak: on the remainder's early continue the ticket is not handed back
            if ticket is None:
                continue
            for at in range(0, full, chunk):
                self.comm.send(rank, hidden[at:at + chunk]).wait()
                sent += chunk
            if full == total:
                self.dropped.pop(rank, None)
                continue
            self.comm.send(rank, hidden[full:]).wait()
            sent += total - full
            self.tickets.hand_back(ticket)
        return sent

    def combine(self, pairs, weights, out):
        """Weighted sum of what came back; a place is held for each row while it is summed."""
        release = None
        held = []
        for (expert, index, rows), weight in zip(pairs, weights):
            n = self.capacity.take(len(index))  # clean: near miss, listed and refunded after the loop
            held.append(n)
            out.index_add_(0, index, rows * weight.unsqueeze(-1))
            extra = self.capacity.take(expert.pad_rows)  # leak: only the last partial is called after the loop
            release = partial(self.capacity.refund, extra)
        for n in held:
            self.capacity.refund(n)
        if release is not None:
            release()
        return out

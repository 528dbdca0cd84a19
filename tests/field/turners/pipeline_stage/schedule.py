"""1F1B and interleaved schedules on top of PipelineStage."""
from __future__ import annotations

from contextlib import ExitStack
from typing import Dict, Iterable, List, Optional, Sequence

from .handles import Activation, ActivationPool, TicketOffice
from .stage import Microbatch, PipelineStage


class OneFOneB:
    def __init__(self, stage: PipelineStage, warmup: int) -> None:
        self.stage = stage
        self.warmup = warmup

    def run(self, batches: Sequence[Microbatch]) -> float:
        loss = 0.0
        pending: List[int] = []
        for mb in batches:
            if len(pending) >= self.warmup:
                loss += self.stage.backward(pending.pop(0))
            if self.stage.forward(mb):
                pending.append(mb.mb_id)
        for mb_id in pending:
            loss += self.stage.backward(mb_id)
        return loss


class Interleaver:
    """Virtual stages: one activation per (chunk, microbatch)."""

    def __init__(self, pool: ActivationPool, tickets: TicketOffice, chunks: int) -> None:
        self.pool = pool
        self.tickets = tickets
        self.rows: List[Dict[int, Activation]] = [{} for _ in range(chunks)]

    def enter(self, chunk: int, mb_id: int) -> bool:
        act = self.pool.take()  # leak: a duplicate (chunk, microbatch) returns with the fresh buffer dropped
        if act is None:
            return False
        row = self.rows[chunk]
        if mb_id in row:
            return True
        row[mb_id] = act
        return True

    def enter_once(self, chunk: int, mb_id: int) -> bool:
        row = self.rows[chunk]
        if mb_id in row:
            return True
        act = self.pool.take()  # clean: near miss, the membership test comes first, then it is stored
        if act is None:
            return False
        row[mb_id] = act
        return True

    def shift(self, chunk: int, mb_id: int) -> None:
        act = self.rows[chunk].pop(mb_id)
        if chunk + 1 == len(self.rows):
            self.pool.restore(act)
            return
        old = self.rows[chunk + 1].pop(mb_id, None)
        if old is not None:
            self.pool.restore(old)
        self.rows[chunk + 1][mb_id] = act

    def clear(self) -> None:
        for row in self.rows:
            for act in row.values():
                self.pool.restore(act)
            row.clear()

    def exchange(self, peers: Iterable[int]) -> List[int]:
        done: List[int] = []
        for peer in peers:
            tag = self.tickets.issue()  # leak: leaving at a negative peer id skips the retire
            if peer < 0:
                break
            done.append(peer)
            self.tickets.retire(tag)
        return done

    def exchange_scoped(self, peers: Iterable[int]) -> List[int]:
        done: List[int] = []
        with ExitStack() as stack:
            for peer in peers:
                tag = self.tickets.issue()  # clean: near miss, the exit stack retires every tag, break included
                stack.callback(self.tickets.retire, tag)
                if peer < 0:
                    break
                done.append(peer)
        return done

    def probe(self, peers: Sequence[int]) -> Optional[int]:
        """First peer that answers."""
        for peer in peers:
            try:
                tag = self.tickets.issue()  # clean: near miss, LookupError means there is none, else retired in finally
            except LookupError:
                return None
            try:
                if peer >= 0:
                    return peer
            finally:
                self.tickets.retire(tag)
        return None

    def barrier(self, rounds: int) -> bool:
        first = self.tickets.issue()  # leak: the caught LookupError of the second issue returns without it
        try:
            second = self.tickets.issue()  # clean: retired along with the first
        except LookupError:
            return False
        for _ in range(rounds):
            if first == second:
                break
        self.tickets.retire(second)
        self.tickets.retire(first)
        return True


def main() -> None:
    pool, tickets = ActivationPool(4), TicketOffice(4)
    stage = PipelineStage(pool, tickets)
    assert OneFOneB(stage, 2).run([Microbatch(i, [1.0, 2.0]) for i in range(5)]) == 15.0
    stage.queue_send(Microbatch(9, [1.0]))
    assert stage.drain() == 1
    inter = Interleaver(pool, tickets, 2)
    inter.enter_once(0, 1)
    inter.shift(0, 1)
    inter.clear()
    assert inter.exchange_scoped([1, 2, -1, 3]) == [1, 2]
    assert inter.probe([-1, 4]) == 4 and inter.barrier(1)
    assert len(pool) == 4 and len(tickets) == 4


if __name__ == "__main__":
    main()

"""All-to-all dispatch and combine on top of lanes, events and credits."""
from dataclasses import dataclass
from typing import Iterator, Optional

import torch

from .lanes import EventBin, LaneRing, RankCredits, board_pair


@dataclass(eq=False)
class Voyage:
    rank: int
    tokens: int
    lane: int
    event: Optional[torch.cuda.Event] = None


class Dispatcher:
    def __init__(self, ring: LaneRing, events: EventBin, credits: RankCredits, net) -> None:
        self.ring, self.events, self.credits, self.net = ring, events, credits, net
        self.fences: list[torch.cuda.Event] = []
        self.last_step: Optional[torch.cuda.Event] = None
        self.barrier_lane = ring.board()  # clean: near miss, close() alights through _clear_barrier()

    def launch(self, rank: int, x: torch.Tensor) -> Optional[Voyage]:
        """Send tokens to one rank; the caller lands the voyage."""
        if not self.credits.consume(rank, len(x)):  # clean: near miss, refunded without lane, else by land()
            return None
        lane = self.ring.board()  # clean: sentinel-checked, travels in the voyage
        if lane < 0:
            self.credits.refund(rank, len(x))
            return None
        voyage = Voyage(rank, len(x), lane)
        voyage.event = self.events.issue()  # clean: travels in the voyage, land() recycles
        self.net.send(lane, x, voyage.event)
        return voyage

    def land(self, voyage: Voyage) -> None:
        self.ring.alight(voyage.lane)
        self.credits.refund(voyage.rank, voyage.tokens)
        if voyage.event is not None:
            self.events.recycle(voyage.event)
            voyage.event = None

    def layer(self, routed: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        afloat: list[Voyage] = []
        for rank, x in routed.items():
            voyage = self.launch(rank, x)  # clean: near miss, everything afloat lands below
            if voyage is None:
                break
            afloat.append(voyage)
        outputs = []
        for voyage in afloat:
            outputs.append(self.net.collect(voyage.lane).clone())
            self.land(voyage)
        return outputs

    def echo(self, rank: int, x: torch.Tensor) -> Optional[float]:
        voyage = self.launch(rank, x)  # leak: a lost reply returns before landing
        if voyage is None:
            return None
        reply = self.net.collect(voyage.lane)
        if reply is None:
            return None
        self.land(voyage)
        return float((reply - x).abs().max())

    def pipelined(self, rank: int, chunks: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        previous: Optional[Voyage] = None
        for chunk in chunks:
            voyage = self.launch(rank, chunk)  # leak: the last chunk's voyage is never landed
            if voyage is None:
                continue
            if previous is not None:
                out = self.net.collect(previous.lane).clone()
                self.land(previous)
                yield out
            previous = voyage

    def multicast(self, ranks: list[int], x: torch.Tensor) -> int:
        lane = self.ring.board()  # clean: near miss, alights even when the loop breaks
        if lane < 0:
            return 0
        reached = 0
        for rank in ranks:
            if not self.credits.consume(rank, len(x)):  # leak: an unreachable rank continues without refund
                break
            if not self.net.reachable(rank):
                continue
            self.net.put(lane, rank, x)
            self.credits.refund(rank, len(x))
            reached += 1
        self.ring.alight(lane)
        return reached

    def overlap(self, halves: tuple[torch.Tensor, torch.Tensor]) -> bool:
        pair = board_pair(self.ring)  # leak: only the even lane alights at the end
        if pair is None:
            return False
        for lane, half in zip(pair, halves):
            self.net.put(lane, 0, half)
        self.ring.alight(pair[0])
        return True

    def fence(self, stream: torch.cuda.Stream) -> None:
        event = self.events.issue()  # clean: near miss, kept in fences, close() recycles
        event.record(stream)
        self.fences.append(event)

    def mark_step(self, stream: torch.cuda.Stream) -> None:
        self.last_step = self.events.issue()  # leak: the previous step's event is overwritten
        self.last_step.record(stream)

    def _clear_barrier(self) -> None:
        if self.barrier_lane >= 0:
            self.ring.alight(self.barrier_lane)
            self.barrier_lane = -1

    def close(self) -> None:
        self._clear_barrier()
        while self.fences:
            self.events.recycle(self.fences.pop())
        if self.last_step is not None:
            self.events.recycle(self.last_step)

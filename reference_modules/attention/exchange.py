"""Exchange between the ranks of a group: posted early, waited for late, never in vain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class ExchangeError(RuntimeError):
    """A rank died, left early or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Sends and receives under way; their tensors must live until `wait`, and the works hold on to them."""

    works: tuple[dist.Work, ...]
    what: str
    timeout: timedelta | None

    def wait(self) -> None:
        """Until all is sent and received, or raise within the timeout."""
        for work in self.works:
            try:
                finished = work.wait() if self.timeout is None else work.wait(self.timeout)
            except RuntimeError as error:
                raise ExchangeError(
                    f"{self.what} failed: a rank died, left or was too slow ({error})"
                ) from error
            if finished is False:
                raise ExchangeError(f"{self.what} did not finish")


@dataclass(frozen=True, slots=True)
class Peers:
    """This rank's place in its group, and how it reaches the others."""

    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    timeout: timedelta | None = None  # None: the group's own

    @staticmethod
    def nobody() -> Peers:
        """A single rank, which exchanges nothing."""
        return Peers(None, 0, 1)

    @staticmethod
    def of(group: dist.ProcessGroup | None, timeout: timedelta | None) -> Peers | None:
        """None where there is nobody to talk to: no group, or a group of one."""
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return None
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):  # what new_group gives to ranks that are not in it
            raise ValueError(
                f"process_group is {group!r}, which this rank is not in; "
                "call the module only on ranks of its group, or give None for all of them"
            )
        ranks = dist.get_world_size(group)
        return Peers(group, dist.get_rank(group), ranks, timeout) if ranks > 1 else None

    def swap(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str, tag: int
    ) -> Pending:
        """Start sending to and receiving from ranks of the group, in rank order, as one batch."""
        operations = [
            dist.P2POp(kind, x, self._global(peer), self.group, tag)
            for kind, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for peer, x in sorted(tensors.items(), key=lambda item: item[0])
        ]
        what = f"rank {self.rank} of {self.ranks}: {what}"
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise ExchangeError(f"{what} could not start: a rank died or left ({error})") from error
        return Pending(tuple(works), what, self.timeout)

    def shift(self, send: Tensor, receive: Tensor, what: str, tag: int) -> Pending:
        """Once around the ring: to the next rank, from the previous."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        return self.swap({after: send}, {before: receive}, what, tag)

    def gather(self, mine: Tensor, what: str) -> list[Tensor]:
        """Every rank's tensor, in rank order; all must have one shape."""
        if self.ranks == 1:
            return [mine]
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        what = f"rank {self.rank} of {self.ranks}: {what}"
        try:
            work = dist.all_gather(everyone, mine, group=self.group, async_op=True)
        except RuntimeError as error:
            raise ExchangeError(f"{what} could not start: a rank died or left ({error})") from error
        if work is not None:
            Pending((work,), what, self.timeout).wait()
        return everyone

    def add_up(self, x: Tensor, what: str) -> Pending:
        """Start replacing `x` by the sum over all ranks."""
        what = f"rank {self.rank} of {self.ranks}: {what}"
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise ExchangeError(f"{what} could not start: a rank died or left ({error})") from error
        return Pending(() if work is None else (work,), what, self.timeout)

    def _global(self, peer: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, peer)

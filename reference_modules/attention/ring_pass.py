"""Keys and values go once around the ring, packed in one buffer, while those at hand are attended to.

In step s rank i works on the keys of rank i − s.  Backward sends them around again, and one step behind
them the sums of their gradients: each rank adds its share and passes them on, and after the last step they
go straight home. The ring stops after the farthest step in which any rank still sees a key, which every
rank works out by itself.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_modules.attention.exchange import Peers, Pending
from reference_modules.attention.joint import Grads, Inputs, Softmax
from reference_modules.attention.pairwise import Held, Work
from reference_modules.attention.placement import Placement, chunks_of
from reference_modules.attention.plain import accumulation_dtype
from reference_modules.attention.seeds import derived
from reference_modules.attention.workspace import Pool, temporary

KEYS_TAG, GRADIENTS_TAG, HOME_TAG = 1, 2, 3


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """What takes keys away: all ranks' padding masks, (ranks, b, n), and this rank's seed of dropout."""

    mask_RBN: Tensor | None = None
    seed: int | None = None

    def inputs(self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, source: int) -> Inputs:
        """This rank's queries with the keys of rank `source`."""
        mask = None if self.mask_RBN is None else self.mask_RBN[source]
        return Inputs.of(q_BNHD, k_BNHD, v_BNHD, mask, derived(self.seed, source))


@dataclass(frozen=True, slots=True)
class Ring:
    """A group of ranks and the tokens each of them holds."""

    peers: Peers
    placement: Placement
    tokens: int

    def held_by(self, rank: int) -> Held:
        return chunks_of(rank % self.peers.ranks, self.peers.ranks, self.tokens, self.placement)

    @property
    def mine(self) -> Held:
        return self.held_by(self.peers.rank)

    def steps(self, work: Work, like: Tensor) -> int:
        """How many steps, the first with a rank's own keys included, until no rank sees any more keys."""
        ranks = range(self.peers.ranks)
        farthest = [
            s for s in ranks if any(work.sees(self.held_by(i), self.held_by(i - s), like) for i in ranks)
        ]
        return max(farthest, default=0) + 1


def ring_forward(
    ring: Ring, work: Work, inputs: Inputs, without: KeyFilter, state: Softmax, pool: Pool | None
) -> None:
    """Merge what every rank's keys give into `state`."""
    peers, steps = ring.peers, ring.steps(work, inputs.q_BNHD)
    with ExitStack() as held:
        travel = _KeysTravel(peers, inputs, steps, pool, held)
        for step in range(steps):
            k, v = travel.start(step)
            source = (peers.rank - step) % peers.ranks
            at_hand = without.inputs(inputs.q_BNHD, k, v, source)
            work.forward(at_hand, ring.mine, ring.held_by(source), state, pool)
            travel.finish()


def ring_backward(
    ring: Ring,
    work: Work,
    dout_BNHD: Tensor,
    inputs: Inputs,
    without: KeyFilter,
    state: Softmax,
    grads: Grads,
    pool: Pool | None,
) -> None:
    """Add to dq what all keys give, and to dk and dv what all ranks' queries give."""
    peers, steps = ring.peers, ring.steps(work, inputs.q_BNHD)
    k = inputs.k_BNHD
    shape, dtype = (2, *k.shape), accumulation_dtype(k.dtype)
    with ExitStack() as held:
        travel = _KeysTravel(peers, inputs, steps, pool, held)
        sums = [held.enter_context(temporary(pool, shape, dtype, k.device)) for _ in range(min(steps, 2))]
        arriving = held.enter_context(temporary(pool, shape, dtype, k.device))
        passed_on: Pending | None = None
        for step in range(steps):
            k_step, v_step = travel.start(step)
            at_hand = sums[step % 2].zero_()
            source = (peers.rank - step) % peers.ranks
            work.backward(
                dout_BNHD,
                without.inputs(inputs.q_BNHD, k_step, v_step, source),
                ring.mine,
                ring.held_by(source),
                state,
                Grads(grads.dq_BNHD, at_hand[0], at_hand[1]),
                pool,
            )
            travel.finish()
            if passed_on is not None:
                passed_on.wait()
                at_hand += arriving
            if step + 1 < steps:
                passed_on = peers.shift(at_hand, arriving, f"gradients after ring step {step}", GRADIENTS_TAG)
        total = _send_home(peers, sums[(steps - 1) % 2], arriving, steps)
        grads.dk_BNHD.add_(total[0])
        grads.dv_BNHD.add_(total[1])


class _KeysTravel:
    """Own keys first, then the previous rank's, and so on; the next ones are on their way during the work."""

    def __init__(self, peers: Peers, inputs: Inputs, steps: int, pool: Pool | None, held: ExitStack) -> None:
        k, v = inputs.k_BNHD, inputs.v_BNHD
        self.peers, self.steps = peers, steps
        self._own = (k, v)
        self._buffers: list[Tensor] = []
        self._pending: Pending | None = None
        if steps > 1:
            for _ in range(min(steps, 3)):
                buffer = held.enter_context(temporary(pool, (2, *k.shape), k.dtype, k.device))
                self._buffers.append(buffer)
            torch.stack(self._own, out=self._buffers[0])

    def start(self, step: int) -> tuple[Tensor, Tensor]:
        """The keys and values of this step; starts bringing the next ones."""
        if self.steps == 1:
            return self._own
        here = self._buffers[_slot(step)]
        if step + 1 < self.steps:
            what = f"keys for ring step {step + 1}"
            self._pending = self.peers.shift(here, self._buffers[_slot(step + 1)], what, KEYS_TAG)
        return here[0], here[1]

    def finish(self) -> None:
        """The next ones have come, and these may be overwritten."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def _slot(step: int) -> int:
    """Own keys stay in buffer 0; the others take turns in 1 and 2."""
    return 0 if step == 0 else 1 + (step - 1) % 2


def _send_home(peers: Peers, sums: Tensor, arriving: Tensor, steps: int) -> Tensor:
    """After the last step this rank holds the sums of the rank steps − 1 before it."""
    if steps == 1:
        return sums
    owner = (peers.rank - steps + 1) % peers.ranks
    holder = (peers.rank + steps - 1) % peers.ranks
    peers.swap({owner: sums}, {holder: arriving}, "gradients on their way home", HOME_TAG).wait()
    return arriving

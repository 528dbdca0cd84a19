"""Parameters' gradients summed over ranks, many small ones packed into few large messages.

Ranks that hold parts of one sequence each get a part of every parameter's gradient.  Two buffers take turns:
while one travels the next is packed, and no more than two buckets of copies exist at any time.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference_modules.attention.exchange import Peers, Pending
from reference_modules.attention.plain import accumulation_dtype
from reference_modules.attention.workspace import Pool, temporary


def reduce_gradients(
    parameters: nn.Module | Iterable[nn.Parameter],
    process_group: dist.ProcessGroup | None = None,
    *,
    average: bool = False,
    bucket_mb: float = 25.0,
    timeout: timedelta | None = None,
    pool: Pool | None = None,
) -> int:
    """Replace each `.grad` by its sum (or mean) over all ranks; returns how many buckets travelled.

    Every rank calls it after its backward, with the same parameters.  One that got no gradient on some ranks
    counts as zero there.  Half precision is summed in float32.  After an error the gradients are a mixture:
    discard them.  Without a process group there is nothing to do.
    """
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb is {bucket_mb}; it must be above 0 (25 is a good size)")
    found = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    wanted = [x for x in found if x.requires_grad]
    peers = Peers.of(process_group, timeout)
    if peers is None or not wanted:
        return 0
    everyone = _agreed(peers, wanted)
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter, used in zip(wanted, everyone, strict=True):
        if used:
            groups[parameter.dtype, parameter.device].append(parameter)
    share = 1.0 / peers.ranks if average else 1.0
    return sum(_reduce(peers, group, int(bucket_mb * (1 << 20)), share, pool) for group in groups.values())


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Some parameters, and the part of a buffer that their gradients share."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor

    def views(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parts = torch.split(self.flat, [x.numel() for x in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            yield parameter, part.view_as(parameter)

    def pack(self) -> None:
        for parameter, view in self.views():
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def unpack(self, share: float) -> None:
        self.flat.mul_(share)
        for parameter, view in self.views():
            if parameter.grad is None:
                parameter.grad = view.to(parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(view)


def _reduce(peers: Peers, parameters: list[nn.Parameter], most: int, share: float, pool: Pool | None) -> int:
    """One device and type: pack, send, and take in what was sent two buckets ago."""
    work, device = accumulation_dtype(parameters[0].dtype), parameters[0].device
    buckets = list(_cut(parameters, most // work.itemsize))
    size = max(sum(x.numel() for x in bucket) for bucket in buckets)
    flying: list[tuple[_Bucket, Pending]] = []
    with ExitStack() as held, torch.no_grad():
        buffers = [held.enter_context(temporary(pool, (size,), work, device)) for _ in buckets[:2]]
        for index, some in enumerate(buckets):
            if len(flying) == 2:
                _land(*flying.pop(0), share)
            bucket = _Bucket(some, buffers[index % 2][: sum(x.numel() for x in some)])
            bucket.pack()
            flying.append((bucket, peers.add_up(bucket.flat, f"gradients of bucket {index}")))
        for bucket, pending in flying:
            _land(bucket, pending, share)
    return len(buckets)


def _land(bucket: _Bucket, pending: Pending, share: float) -> None:
    pending.wait()
    bucket.unpack(share)


def _cut(parameters: list[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """In the order of the backward, last parameters first; one that is larger than a bucket has its own."""
    bucket: list[nn.Parameter] = []
    for parameter in reversed(parameters):
        if bucket and sum(x.numel() for x in bucket) + parameter.numel() > most:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def _agreed(peers: Peers, parameters: list[nn.Parameter]) -> list[bool]:
    """Which parameters have a gradient on any rank; ValueError on all where ranks differ in parameters."""
    device = parameters[0].device
    sparse = [tuple(x.shape) for x in parameters if x.grad is not None and x.grad.layout != torch.strided]
    shapes = "; ".join(f"{tuple(x.shape)} {x.dtype}" for x in parameters)
    mine = torch.tensor([len(parameters), zlib.crc32(shapes.encode()), len(sparse)], device=device)
    for rank, theirs in enumerate(peers.gather(mine, "comparing parameters")):
        if theirs[2]:
            own = f", of shape {sparse[0]} here" if sparse else ""
            raise ValueError(
                f"rank {rank} has a sparse gradient{own}; only dense ones are summed: use sparse=False"
            )
        if not torch.equal(theirs[:2], mine[:2]):
            raise ValueError(
                f"rank {rank} has {int(theirs[0])} parameters and rank {peers.rank} {len(parameters)}, or of "
                "other shapes or types; build the module alike on all ranks, and freeze alike"
            )
    used = torch.tensor([x.grad is not None for x in parameters], dtype=torch.uint8, device=device)
    return torch.stack(peers.gather(used, "comparing gradients")).any(0).tolist()

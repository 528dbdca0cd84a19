"""The words of the pool's errors: the pool's name, the places involved, the way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from reference_modules.pool.errors import PoolError, megabytes
from reference_modules.pool.leases import Lease, call_site

if TYPE_CHECKING:
    from reference_modules.pool.tensor_pool import TensorPool

UNTRACKED = "unknown (tracking=True names it)"
MOST_NAMED = 20


def released_twice(pool: str, lease: Lease, first: str | None) -> PoolError:
    """The tensor was given back before and is still held."""
    return PoolError(
        f"pool {pool!r}: tensor released twice: allocated at {lease.site or UNTRACKED}, "
        f"released at {first or UNTRACKED}, released again at {call_site()}; drop the second release"
    )


def of_another_pool(pool: str, other: str, lease: Lease) -> PoolError:
    """The tensor is a lease of a pool, but not of this one."""
    return PoolError(
        f"pool {pool!r}: this tensor belongs to pool {other!r} (allocated at {lease.site or UNTRACKED}) "
        f"but is released at {call_site()}; release it to the pool it came from"
    )


def never_allocated(pool: str, tensor: object) -> PoolError:
    """Nothing is known of the tensor: a stranger, an alias, or released before without tracking."""
    return PoolError(
        f"pool {pool!r}: the {type(tensor).__name__} released at {call_site()} is no lease of this pool: "
        "it was never allocated here, "
        "or was released before; release the very object that allocate returned, not a view of it, once"
    )


def closed(pool: str) -> PoolError:
    """The pool serves no more."""
    return PoolError(f"pool {pool!r} is closed (asked at {call_site()}); make a new TensorPool")


def no_room(pool: str, nbytes: int, max_bytes: int, in_use: int, waiting: int) -> PoolError:
    """The limit forbids the request even with every idle block given back."""
    return PoolError(
        f"pool {pool!r}: {nbytes} bytes ({megabytes(nbytes)}) do not fit: max_bytes is {max_bytes}, "
        f"{in_use} bytes are leased and "
        f"{waiting} blocks wait for their last alias; release leases and drop their aliases, or raise "
        "max_bytes"
    )


def still_held(
    pool: str, standing: Iterable[Lease], abandoned: Counter[str], abandoned_count: int
) -> PoolError:
    """The pool was closed with leases that nobody gave back."""
    held = Counter[str]()
    nbytes = 0
    for lease in standing:
        held[lease.site or UNTRACKED] += 1
        nbytes += lease.nbytes
    lines = [
        f"pool {pool!r} closed with {held.total()} outstanding leases ({megabytes(nbytes)}) and "
        f"{abandoned_count} abandoned ones; "
        "every allocate needs one deallocate"
    ]
    lines += _named("outstanding", held)
    lines += _named("abandoned", abandoned)
    return PoolError("\n  ".join(lines))


def _named(kind: str, sites: Counter[str]) -> list[str]:
    lines = [f"{kind}: {count} from {site}" for site, count in sites.most_common(MOST_NAMED)]
    if len(sites) > MOST_NAMED:
        lines.append(f"{kind}: and {len(sites) - MOST_NAMED} more places")
    return lines


def wrong_release(pool: TensorPool, tensor: object, others: Iterable[TensorPool]) -> PoolError:
    """What is wrong with a release that found no lease."""
    known = pool.leases.released.get(id(tensor))
    if known is not None:
        return released_twice(pool.name, *known)
    for other in others:
        lease = other.leases.standing.get(id(tensor))
        if other is not pool and lease is not None and lease() is tensor:
            return of_another_pool(pool.name, other.name, lease)
    return never_allocated(pool.name, tensor)

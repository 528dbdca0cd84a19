"""One pass through everything, on random documents: `python -m longdoc` from the examples folder."""

from __future__ import annotations

import torch

from . import EncoderConfig, LongDocEncoder, get_memory_pool
from .kv_blocks import KVBlockManager
from .prefix_cache import PrefixCache
from .ring import RingAttention
from .scheduler import Request, Scheduler
from .scratch import mean_of_chunks, sliding_windows
from .service import EmbeddingService
from .staging import Offloader, TransferGate, landing


def main() -> None:
    torch.manual_seed(0)
    pool = get_memory_pool()
    config = EncoderConfig()
    service = EmbeddingService(LongDocEncoder(config, enable_memory_pool=True))
    documents = [torch.randint(config.vocabulary, (length,)).tolist() for length in (300, 200, 256)]
    print("nearest:", service.nearest(documents))

    ring = RingAttention()
    q = torch.randn(1, 64, 4, 16)
    print("ring:", tuple(ring(q, q, q).shape))
    ring.close()

    scheduler = Scheduler(KVBlockManager(64))
    cache = PrefixCache(scheduler.manager)
    scheduler.submit(Request(1, 300))
    print(
        "admitted:",
        [request.request_id for request in scheduler.step()],
        cache.reserve(7, 32),
        cache.cached_tokens(7),
    )
    scheduler.follow(scheduler.running[1], 2)
    scheduler.shutdown()

    offloader = Offloader(pool, TransferGate())
    offloader.park("q", q)
    with landing(pool, q) as back:
        offloader.fetch("q", back)
    print("windows:", sum(1 for _ in sliding_windows(pool, torch.randn(1, 100, 8), 16, 8)))
    print("mean:", float(mean_of_chunks(pool, [q, q]).mean()))
    print(f"outstanding: {pool.outstanding}, reserved: {pool.allocated_gb:.3f} GiB")


if __name__ == "__main__":
    main()

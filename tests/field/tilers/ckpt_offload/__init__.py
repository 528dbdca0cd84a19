from .engine import ActivationOffloader
from .hooks import OffloadHooks, RecomputeHooks, SelectiveHooks, TieredHooks
from .pinned import PinnedBuffer, PinnedPool
from .prefetch import DoubleBuffer, OrderedPrefetcher, Prefetcher

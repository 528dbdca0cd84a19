"""Words by which conditions tell why something taken out of a store is passed over."""

BOOKS = frozenset({"ref", "refs", "refcount", "refcnt", "references", "count", "counter", "counts", "pin",
                   "pinned", "pins", "used", "use", "uses", "users", "using", "busy", "free", "freed",
                   "alloc", "allocated", "state", "status", "version", "generation", "gen", "epoch", "stamp",
                   "stale", "seen", "cancel", "cancelled", "canceled", "removed", "deleted", "evicted",
                   "owner", "owned", "held", "holder", "holders", "lease", "leased", "taken", "lock",
                   "locked", "hash", "null", "reserved", "sentinel", "placeholder", "dummy", "active",
                   "released", "invalid", "current", "ignore", "ignored", "skip", "exclude", "excluded",
                   "banned", "blocked", "parked", "lent", "rented"})  # fmt: skip
"""Words that tell where the thing is, and whether the entry of the store still counts."""

DEAD = frozenset({"alive", "dead", "died", "broken", "closed", "close", "closing", "expired", "expire",
                  "expires", "expiry", "healthy", "health", "unhealthy", "ttl", "age", "old", "older",
                  "oldest", "last", "since", "idle", "timeout", "deadline", "time", "now", "monotonic",
                  "failed", "fail", "failing", "fails", "failure", "error", "errors", "connected",
                  "disconnected", "valid", "bad", "good", "ok", "corrupt", "corrupted", "poisoned", "lost",
                  "retired", "exitcode", "returncode", "poll", "running", "ping", "pinged", "responsive",
                  "usable", "exited", "terminated", "terminating", "stopped", "killed", "defunct", "worn",
                  "faulty", "zombie", "gone", "ready"})  # fmt: skip
"""Words for what is of no more use: dropping that is right, unless the class puts a new one in its place."""

LASTING = frozenset({"size", "nbytes", "length", "len", "shape", "dtype", "device", "numel", "capacity",
                     "dim", "ndim", "id", "uid", "rank", "index", "idx", "number", "num", "kind", "type",
                     "name", "node", "host", "port", "key", "stride", "width", "height", "order",
                     "level"})  # fmt: skip
"""Words for what a thing is from the start: what never suits anybody may go."""

"""In-memory checkpoints: every node keeps a peer's newest snapshots in shared memory segments."""

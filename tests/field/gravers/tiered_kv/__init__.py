"""Three-tier KV store: device pages, host frames, and spill files on a local disk."""

"""Background checkpoint daemon: stage into pinned memory, write from a thread."""

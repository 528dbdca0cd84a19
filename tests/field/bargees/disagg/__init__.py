"""Prefill and decode on separate workers, KV moved between them through registered windows."""

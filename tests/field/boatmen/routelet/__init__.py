"""A small router: worker registry, inflight slots, streaming relays."""

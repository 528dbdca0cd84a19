"""Multi-adapter serving: adapters live in device slots, requests hold references on them."""

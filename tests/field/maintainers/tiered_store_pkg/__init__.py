"""KV offload to a tier of storage backends."""

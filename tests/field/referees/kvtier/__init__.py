"""Tiered KV cache: host memory objects, storage backends and the engine-side connector."""

"""Reference implementations in torch: pool, mixin and exact attention. Knows nothing of the auditor."""

"""Publishing of trainer weights to rollout engines: versions are pinned, chunks travel in slabs."""

"""Sequence parallelism: head/sequence all-to-all over arena workspaces."""

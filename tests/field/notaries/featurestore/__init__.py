"""Pinned feature pages, the views over them and the jobs that read."""

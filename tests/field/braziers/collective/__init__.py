"""Gradient reduction: device heap, caching pools, communicators and buckets."""

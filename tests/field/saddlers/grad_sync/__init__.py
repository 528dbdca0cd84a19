"""Bucketed gradient synchronisation for data-parallel training."""

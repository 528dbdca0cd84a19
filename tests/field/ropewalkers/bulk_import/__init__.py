"""Nightly import of partner catalogues."""

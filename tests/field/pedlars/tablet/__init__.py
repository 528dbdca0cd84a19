"""Tablet server: block store, tablets over it and the request handlers."""

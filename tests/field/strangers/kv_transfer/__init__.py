"""Sender and receiver of KV pages with a shared registry of lanes."""

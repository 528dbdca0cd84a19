"""Prompt (prefix) cache: radix tree, sessions, persistence, front end."""

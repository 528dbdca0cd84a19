"""Ulysses-style head/sequence exchange."""

"""Speculative decoding: draft slots, a proposer and a verifier."""

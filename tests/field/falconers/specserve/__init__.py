"""Speculative decoding server: a draft model proposes, the target model verifies."""

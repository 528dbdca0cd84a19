"""Dilated, ring and block-sparse attention with exact gradients."""

from reference_modules.attention.functional import dilated_attention

__all__ = ["dilated_attention"]

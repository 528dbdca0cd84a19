"""Shared-memory data loading for pre-tokenised corpora."""

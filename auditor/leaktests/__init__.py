"""Leak tests: plans, generated tests, and the support they run on. Importing this imports no torch."""

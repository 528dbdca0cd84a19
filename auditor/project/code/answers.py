"""What a function answers by which its callers know that nothing came of it."""

NOTHING = frozenset({"None", "False", "0", "-1", "[]", "()"})
"""As the text has it."""

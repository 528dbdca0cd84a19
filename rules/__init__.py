"""One fault a file; a rule is found by listing this folder."""

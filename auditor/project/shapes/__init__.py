"""What methods do to the fields of their own object, and the pairs that undo one another's work on them."""

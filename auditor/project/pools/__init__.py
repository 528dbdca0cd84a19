"""Who lends and who takes back: the pools of the tree, their halves, what they hand out."""

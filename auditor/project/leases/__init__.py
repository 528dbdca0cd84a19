"""What becomes of each lease: followed in its function, asked of those who get it."""

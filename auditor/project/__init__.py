"""What is known across files: classes, calls, summaries."""

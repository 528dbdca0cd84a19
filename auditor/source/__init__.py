"""From bytes to text: discovery, reading, suppression comments, the pre-filter. Never runs code."""

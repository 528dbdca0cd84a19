"""Host-to-device prefetch queue for tokenized shards."""

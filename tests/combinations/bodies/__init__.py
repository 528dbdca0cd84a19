"""What a pool's own methods take out of its store and lose, over many stores."""

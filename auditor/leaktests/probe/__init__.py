"""The part that runs the code under test: started as a process of its own, it imports torch; nothing else here does."""

"""The terminal's view of a run: how it is, what it says, how to stop it."""

"""What decides what: pure functions of an observation. Imports nothing of this project, no clock, no I/O, no randomness."""

"""Which states live, which is ambient, how a process starts and stops."""

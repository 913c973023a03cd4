"""Faults that a rehearsal must notice: each function returns a context in which the library has it."""

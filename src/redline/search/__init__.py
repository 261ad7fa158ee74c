"""Loops that ask the bench for more measurements."""

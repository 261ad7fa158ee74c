"""Simulated truths that searches are set against: memory curves, and spaces of recipes."""

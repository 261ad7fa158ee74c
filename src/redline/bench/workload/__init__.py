"""This package holds models and what they are fed: named sources, the user's own, inputs and losses of any structure, the timed step."""

"""The printers: they know units, intervals and doubts, and nothing of verbs."""

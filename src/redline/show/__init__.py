"""The printers know units, intervals and doubts, and nothing of verbs."""

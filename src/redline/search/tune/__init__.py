"""The fastest recipe that keeps the numbers right, and what each of its steps brings."""

"""What a search for the fastest recipe has seen, and what that says: pure functions of its records."""

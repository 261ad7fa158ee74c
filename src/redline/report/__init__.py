"""What people and other programs read: pure functions of records that return text, and print nothing."""

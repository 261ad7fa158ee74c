"""Output for people and programs: pure functions of records that return text and print nothing."""

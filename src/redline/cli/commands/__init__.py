"""What a person types: the options of each command, and the call of its body, which is imported only then."""

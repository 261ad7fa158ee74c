"""Each family of optimisations has one file here. To add a family, add a file."""

"""This package holds one file per source of data."""

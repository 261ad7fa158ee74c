"""This package has a bench that is made up: `FakeBench` and its worlds, for tests here and for people who extend Redline."""

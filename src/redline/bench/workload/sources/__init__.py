"""This package holds the sources of models: one file per source, each registering itself in `redline.bench.workload.build.SOURCES`."""

"""Where models come from: one file per source, each registering itself in `redline.bench.workload.build.SOURCES`."""

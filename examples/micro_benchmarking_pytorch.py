"""The workshop's benchmark script, on Redline's bench: `python3 micro_benchmarking_pytorch.py --network resnet50`."""

import sys
from pathlib import Path

try:
    from redline.compat.micro import script
except ImportError:  # run from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    from redline.compat.micro import script

if __name__ == "__main__":
    script()

"""`toolkit launch` with faulty_run.py in the place of run.py, or AS_MODULE as if there were none of either.

Everything else is the product's own.
"""

import os
import sys
from pathlib import Path

from toolkit.cli import launch, main

launch.SCRIPT = Path(__file__).with_name("nowhere" if os.environ.get("AS_MODULE") else "faulty_run.py")
sys.exit(main(["launch", *sys.argv[1:]]))

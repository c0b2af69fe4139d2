"""`toolkit launch` with faulty_run.py in the place of run.py; everything else is the product's own."""

import sys
from pathlib import Path

from toolkit.cli import launch, main

launch.program = lambda: [str(Path(__file__).with_name("faulty_run.py"))]
sys.exit(main(["launch", *sys.argv[1:]]))

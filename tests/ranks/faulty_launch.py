"""`toolkit launch` with faulty_run.py, or another SCRIPT, in the place of run.py; AS_MODULE as if there were none.

Everything else is the product's own.
"""

import os
import sys
from pathlib import Path

from toolkit.cli import main
from toolkit.jobs import launch

script = "nowhere" if os.environ.get("AS_MODULE") else os.environ.get("SCRIPT", "faulty_run.py")
launch.SCRIPT = Path(__file__).with_name(script)
sys.exit(main(["launch", *sys.argv[1:]]))

"""run.py that leaves in the folder TOLD what its rank was given: environment, command line, process."""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    from toolkit.cli import main

    code = main(["train", *sys.argv[1:]])
    if code:
        sys.exit(code)
    told = {
        "environ": dict(os.environ),
        "words": sys.argv[1:],
        "pid": os.getpid(),
        "random_hashes": sys.flags.hash_randomization,
        "cores": len(os.sched_getaffinity(0)),
    }
    Path(os.environ["TOLD"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))

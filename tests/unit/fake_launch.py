"""Stands in for `toolkit launch`: a run folder, metrics, a checkpoint that it goes on from, DONE.

A file NAME.do beside the sweep's directory says what the run NAME does instead: an exit code, or `wait` for a signal.
"""

import json
import signal
import sys
import time
from pathlib import Path

words = dict(word.partition("=")[::2] for word in sys.argv[1:] if "=" in word)
folder = Path(words["run.dir"].strip("'")) / words["run.name"]
folder.mkdir(parents=True, exist_ok=True)
with open(folder.parents[1] / "calls.txt", "a") as calls:
    calls.write(f"{words['run.name']} {sys.argv[1]}\n")
step = json.loads((folder / "step").read_text()) if (folder / "step").exists() else 0
lr = float(words.get("optim.lr", "1"))
with open(folder / "metrics.jsonl", "a") as metrics:
    for place in (step + 1, step + 2):
        metrics.write(json.dumps({"step": place, "loss": 5 - place, "tokens_per_s": 100.0 * place}) + "\n")
    metrics.write(json.dumps({"step": step + 2, "eval_loss": abs(lr - 0.3) + 1}) + "\n")
(folder / "step").write_text(str(step + 2))
mischief = folder.parents[1] / f"{folder.name}.do"
if not mischief.exists():
    (folder / "DONE").write_text("{}")
    sys.exit(0)
if mischief.read_text() == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
    (folder / "ready").touch()
    time.sleep(60)
(folder / "FAILED").write_text(f"exit code {mischief.read_text()}\nbroken on purpose\n")
sys.exit(int(mischief.read_text()))

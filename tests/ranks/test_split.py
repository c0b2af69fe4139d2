"""`toolkit generate engine=deepspeed` on real ranks."""

import json
from pathlib import Path

from ranks import REPOSITORY, forked, run

from tests.unit.speaker import write_random
from toolkit.cli import main

WORKER = str(REPOSITORY / "tests" / "ranks" / "split_worker.py")


def test_two_ranks_answer_as_one_process_does(tmp_path: Path) -> None:
    model, asked = write_random(tmp_path / "model"), tmp_path / "in.jsonl"
    asked.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "你好", "and so on")))
    words = [str(model), f"input={asked}", "max_new_tokens=12", "batch_size=2"]
    assert main(["generate", *words, f"output={tmp_path}/one"]) == 0
    finished = run(forked(2, WORKER, *words, f"output={tmp_path}/two"), cwd=tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    assert finished.output.count("ALL CHECKED") == 2
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert finished.output.count(f"wrote {tmp_path}/two: 3 rows.") == 1

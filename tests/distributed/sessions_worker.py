"""Run on every rank: several training sessions one after another in one process group, so that a launch is paid once.

Arguments: a JSON file with [{"overrides": [...]}, …]. A case with "died" begins with a run folder as a run leaves it
that died some steps after a checkpoint: {"of": RUN, "step": CHECKPOINT, "as": NAME}. One with "spoil" gets wrong
numbers on the last rank: {"steps": see spoil.py, "note": FILE}; it may end with Diverged, which is noted too. fp16 is
made possible on CPUs, where DeepSpeed refuses it. Everything else is the product's own code.
"""

import json
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from toolkit.config.checks import check
from toolkit.config.load import load
from toolkit.launch import environment
from toolkit.messages import set_language


def die(of: str, step: int, folder: str) -> None:
    """Copy a finished run, without what it did after a checkpoint but for the log."""
    shutil.copytree(of, folder)
    (Path(folder) / "DONE").unlink()
    for checkpoint in (Path(folder) / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def main() -> None:
    """Run every case."""
    set_language("en")
    words = environment.strip_launcher_arguments(sys.argv[1:])
    cases = json.loads(Path(words[0]).read_text())
    ranks = environment.detect(os.environ)
    environment.apply(ranks, os.environ)

    import torch
    from deepspeed.accelerator import get_accelerator
    from spoil import spoilt

    from toolkit.cli.session import run_session
    from toolkit.distributed import failure, process_group
    from toolkit.errors import Diverged
    from toolkit.train import checkpoint, resume
    from toolkit.train.prepared import prepare_data

    checkpoint._PROBE_S = 60.0  # a probe in every checkpoint, though these follow each other within a second
    get_accelerator().is_fp16_supported = lambda: True
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    for index, case in enumerate(cases):
        if "died" in case:
            process_group.on_rank0(partial(die, **{"folder" if k == "as" else k: v for k, v in case["died"].items()}))
        loaded = load(case["overrides"])
        check(loaded, ranks.world_size)
        prepared = prepare_data(loaded.cfg, speaks=False)
        if index == 0:
            process_group.start(loaded.cfg.distributed)
        spoil = case.get("spoil", {"steps": {}, "note": os.devnull})
        note, is_last = Path(spoil["note"]), ranks.rank == ranks.world_size - 1
        try:
            with spoilt(spoil["steps"], is_last, note):
                run_session(loaded.cfg, ranks, prepared, time.monotonic())
        except Diverged as error:
            if not spoil["steps"]:
                raise
            resume.release()
            if is_last:
                with note.open("a", encoding="utf-8") as lines:
                    lines.write(f"Diverged: {error}\n")
    failure.end_watch()
    process_group.stop()


if __name__ == "__main__":
    main()

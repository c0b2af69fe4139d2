"""Train a recipe; the same command line under every launcher.

deepspeed run.py recipe=quickstart
deepspeed --hostfile hostfile run.py recipe=chatglm model.path=/models/chatglm3-6b
torchrun --nproc-per-node 8 run.py recipe=chatglm zero=stage3_offload
python run.py recipe=quickstart
"""

import sys

from toolkit.__main__ import start

if __name__ == "__main__":
    sys.exit(start(["train", *sys.argv[1:]]))

"""Write a hostfile from Slurm's list of nodes.

toolkit hostfile output=FILE [nodes=LIST] [slots=N]

  output=FILE    must not exist
  nodes=LIST     such as gpu[01-03,07]; default: the Slurm job's nodes, SLURM_JOB_NODELIST
  slots=N        GPUs per node; default: the Slurm job's, SLURM_GPUS_ON_NODE
"""

import os

from toolkit.arguments import named_arguments, positive_int, write_output
from toolkit.launch import hostfile
from toolkit.messages import LaunchError, say


def run(words: list[str]) -> None:
    usage = "toolkit hostfile output=hostfile nodes=gpu[01-04] slots=8"
    arguments = named_arguments(words, required=("output",), optional=("nodes", "slots"), usage=usage)
    defaults = {"nodes": os.environ.get("SLURM_JOB_NODELIST", ""), "slots": os.environ.get("SLURM_GPUS_ON_NODE", "")}
    arguments = {**{name: value for name, value in defaults.items() if value}, **arguments}
    slots = positive_int(arguments, "slots")
    if not arguments.get("nodes") or not slots:
        raise LaunchError("this is no Slurm job that says nodes and GPUs: give both. {usage}", usage=usage)
    text = "".join(f"{host} slots={slots}\n" for host in hostfile.expand_nodes(arguments["nodes"]))
    hosts = hostfile.parse_hostfile(text, arguments["output"])
    write_output(arguments, text)
    say("{file}: {count} nodes, {slots} GPUs each.", file=arguments["output"], count=len(hosts), slots=slots)

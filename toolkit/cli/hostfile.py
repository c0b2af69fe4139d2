"""Write a hostfile from the nodes of a job of Slurm, SkyPilot or dstack.

toolkit hostfile output=FILE [nodes=LIST] [slots=N]

  output=FILE    must not exist
  nodes=LIST     such as gpu[01-03,07]; default: the job's nodes (SLURM_JOB_NODELIST, SKYPILOT_NODE_IPS,
                 DSTACK_NODES_IPS)
  slots=N        GPUs per node; default: the job's
"""

import os

from toolkit.command_line import named_arguments, positive_int, write_output
from toolkit.launch import hostfile
from toolkit.messages import LaunchError, say

_JOBS = {
    "SLURM_JOB_NODELIST": "SLURM_GPUS_ON_NODE",
    "SKYPILOT_NODE_IPS": "SKYPILOT_NUM_GPUS_PER_NODE",
    "DSTACK_NODES_IPS": "DSTACK_GPUS_PER_NODE",
}
"""Variable with a job's nodes -> variable with the GPUs of each."""


def run(words: list[str]) -> None:
    """Write a hostfile of the nodes that are typed, else of those of the job that this process runs in."""
    usage = "toolkit hostfile output=hostfile nodes=gpu[01-04] slots=8"
    arguments = named_arguments(words, required=("output",), optional=("nodes", "slots"), usage=usage)
    for nodes, gpus in _JOBS.items():
        if node_list := os.environ.get(nodes):  # SkyPilot and dstack write one address a line
            job = {"nodes": ",".join(node_list.split()), "slots": os.environ.get(gpus, "")}
            arguments = {**{name: value for name, value in job.items() if value}, **arguments}  # what is typed wins
            break
    slots = positive_int(arguments, "slots")
    if not arguments.get("nodes") or not slots:
        raise LaunchError(
            "this is no job of Slurm, SkyPilot or dstack that says nodes and GPUs: give both. {usage}", usage=usage
        )
    text = "".join(f"{host} slots={slots}\n" for host in hostfile.expand_nodes(arguments["nodes"]))
    hosts = hostfile.parse_hostfile(text, arguments["output"])
    write_output(arguments, text)
    say("{file}: {count} nodes, {slots} GPUs each.", file=arguments["output"], count=len(hosts), slots=slots)

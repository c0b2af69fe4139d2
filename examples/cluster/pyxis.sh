#!/bin/bash
# As slurm.sh, in a container: for Slurm with NVIDIA's Pyxis and enroot. Nothing is installed on the nodes:
#   sbatch examples/cluster/pyxis.sh model.path=/work/models/chatglm3-6b data=/work/chat.jsonl
# IMAGE is an image in a registry (REGISTRY#NAME:TAG), or a file that `enroot import` wrote. WORK is on a file system
# that all nodes share; in the container it is /work.
#SBATCH --job-name=chatglm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the time limit the ranks are told to save a checkpoint and exit with 75.
#SBATCH --signal=USR1@300
set -euo pipefail
IMAGE=${IMAGE:-registry.example.com#exacttune:cuda}
WORK=${WORK:-$PWD}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR MASTER_PORT=29500
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # since Slurm 22.05 srun does not take it from sbatch

container=(--container-image="$IMAGE" --container-mounts="$WORK:/work" --container-workdir=/work)
container+=(--no-container-mount-home)
status=0
srun "${container[@]}" toolkit train recipe=chatglm run.name="$SLURM_JOB_NAME" checkpoint.every=500 "$@" || status=$?
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" # the same command resumes from the last checkpoint
fi
exit "$status"

#!/bin/bash
# Two nodes with 8 GPUs each; in the checkout, with the environment in .venv, on a file system that all nodes share:
#   sbatch examples/cluster/slurm.sh model.path=/models/chatglm3-6b data=chat.jsonl
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
source .venv/bin/activate

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR MASTER_PORT=29500
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # since Slurm 22.05 srun does not take it from sbatch

status=0
srun python run.py recipe=chatglm run.name="$SLURM_JOB_NAME" checkpoint.every=500 "$@" || status=$?
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" # the same command resumes from the last checkpoint
fi
exit "$status"

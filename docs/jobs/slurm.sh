#!/bin/bash
# Training on the nodes of a Slurm cluster: TARGET=my-org/my-model sbatch slurm.sh --batch 64
# Arguments go to `peagle train`. All nodes see this folder; a job that was stopped goes on when it
# is submitted again.
#SBATCH --job-name=peagle
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120  # time to write a checkpoint
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110  # torchrun's own would be 30 seconds
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${GPUS:-8}" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \
  -m peagle train "$TARGET" --data "${DATA:-captured}" --output "${RUN:-runs/mine}" \
  --resume auto "$@"

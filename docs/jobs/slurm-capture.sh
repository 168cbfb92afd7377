#!/bin/bash
# A capture in parts, a GPU for each: TARGET=my-org/my-model sbatch slurm-capture.sh
# A part that failed is made by submitting its number again: sbatch --array=3 ...
#SBATCH --job-name=peagle-capture
#SBATCH --array=1-8
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
set -euo pipefail
srun python -m peagle data capture "$TARGET" --data "${DATA:-answers.jsonl}" \
  --output "${CAPTURED:-captured}" --part "$SLURM_ARRAY_TASK_ID/${PARTS:-8}" "$@"

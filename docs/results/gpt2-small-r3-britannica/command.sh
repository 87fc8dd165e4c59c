#!/usr/bin/env bash
# gpt2-small, R=3, DeepLoop sandwich (p=1/2) on the Encyclopaedia Britannica (9th ed.), one H200, ten minutes.
# BRITANNICA names the corpus: JSON lines with a field "text", .xz is fine.
set -euo pipefail
: "${BRITANNICA:?set BRITANNICA to the JSON-lines file}"
deeploop=${DEEPLOOP:-deeploop}
$deeploop prepare text "$BRITANNICA" --out data/britannica
# The paper's recipe but for the batch (32 sequences in place of 480) and the number of steps:
# warm-up keeps the public code's ramp, 1e-3 over 2,000 steps.
$deeploop train gpt2-small \
  --out runs/gpt2-small-r3-britannica --resume \
  --data.path data/britannica --data.validation-sequences 488 --data.validate-every 200 \
  --optim.batch 32 --device.micro-batch 32 --optim.steps 2400 --optim.warmup-steps 2000 \
  --checkpoint.every 2400

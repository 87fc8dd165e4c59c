#!/usr/bin/env bash
# gpt2-small, R=3, DeepLoop (p=1/2): seven minutes of training on one H200, then the eight tasks, in three steps.
# BRITANNICA names the corpus (JSON lines with a field "text"), EVAL_DATA the folder <task>/<split>.jsonl.
set -euo pipefail
: "${BRITANNICA:?set BRITANNICA to the JSON-lines file}" "${EVAL_DATA:?set EVAL_DATA to the folder of task files}"
run=runs/gpt2-small-r3
# 1. where the harness is
deeploop eval --requests requests.npz --data "$EVAL_DATA"
# 2. where the GPU is; no harness needed
deeploop prepare text "$BRITANNICA" --out data/britannica
deeploop train gpt2-small --out $run --data.path data/britannica \
  --optim.batch 32 --device.micro-batch 32 --optim.steps 1300 --optim.warmup-steps 1100 --optim.peak-lr 5.5e-4 \
  --data.validate-every 100 --data.validation-sequences 200 --checkpoint.every 1300 --log.every 10
deeploop eval $run --requests requests.npz
deeploop validate $run --rounds 1 2 3 4 5 7
deeploop diagnose $run
# 3. where the harness is, with scores.npz of step 2
deeploop eval --scores $run/scores.npz --data "$EVAL_DATA"

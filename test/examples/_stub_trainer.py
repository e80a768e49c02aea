"""Stands for examples/trudi_humanoid.py: the same files in no time.

A seed of 13 fails after its first evaluation; STUB_DELAY is a pause after each.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import yaml

# The trainer ends with status 0 when it is told to stop.
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(0))

words = dict(word.split("=", 1) for word in sys.argv[1:])
total = int(words["collector.total_frames"])
start = 0
if "resume" in words:
    run = Path(words["resume"])
    config = yaml.safe_load((run / "config.yaml").read_text())
    start = max(int(path.stem.split("-")[1]) for path in run.glob("checkpoints/*"))
else:
    run = Path(words["logger.dir"])
    run.mkdir(parents=True)
    config = {"seed": int(words["seed"]), "interval": int(words["logger.eval_interval"])}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "scalars.csv").write_text("frames,name,value\n")
for frames in range(start + config["interval"], total + 1, config["interval"]):
    with (run / "scalars.csv").open("a") as file:
        file.write(f"{frames},time/seconds,{frames / 100}\n")
        for kind in ("deterministic", "stochastic"):
            file.write(f"{frames},eval/return_{kind},{frames}.0\n")
    (run / "checkpoints" / f"checkpoint-{frames:012d}.torchrl").mkdir(parents=True)
    if config["seed"] == 13:
        sys.exit("the loss is NaN")
    time.sleep(float(os.environ.get("STUB_DELAY", "0")))
sys.stdout.write("done\n")

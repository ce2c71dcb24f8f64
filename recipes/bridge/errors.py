"""Held-out velocity error of some experts, each on its own cluster, by time: errors.py ARM EXPERT EXPERT."""

import json
import sys
from pathlib import Path
from statistics import mean

arm, *experts = sys.argv[1:]
latest = json.loads((Path(arm) / "evaluation/bridge.json").read_text(encoding="utf-8"))
by_time = latest["diagnostics"]["experts"]["expert_on_cluster"]["by_time"]
errors = [mean(table[int(expert)][int(expert)] for expert in experts) for table in by_time]
early, last, whole = mean(errors[:9]), errors[9], mean(errors)
print(f"{Path(arm).name}: {early:.3f} below 0.9, {last:.2f} in the last tenth, {whole:.3f} on the mean")

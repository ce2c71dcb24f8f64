"""Print the validation velocity error of experts, each on its cluster, by time: errors.py ARM EXPERT..."""

import json
import sys
from pathlib import Path
from statistics import mean

arm, *experts = sys.argv[1:]
latest = json.loads((Path(arm) / "evaluation/bridge.json").read_text(encoding="utf-8"))
by_time = latest["diagnostics"]["experts"]["expert_on_cluster"]["by_time"]
errors = [mean(table[int(expert)][int(expert)] for expert in experts) for table in by_time]
print(f"{Path(arm).name}: t below 0.9 {mean(errors[:9]):.3f}, t from 0.9 to 1 {errors[9]:.2f}, mean {mean(errors):.3f}")

"""Names that people type: objectives, solvers, stages, splits. No torch here: the command line imports this module."""

import re
from typing import Literal, TypedDict, get_args

HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
"""A name on the Hugging Face hub, `owner/name`."""

ScheduleName = Literal["linear", "cosine", "ddpm-linear", "ddpm-scaled-linear", "ddpm-cosine", "edm"]
Prediction = Literal["velocity", "epsilon", "x0", "v_prediction", "score"]
TimesName = Literal["uniform", "logit-normal", "log-normal"]
WeightingName = Literal["constant", "min-snr", "as-velocity", "as-epsilon", "as-x0"]
BridgeMode = Literal["exact", "published-linear", "published-schedule"]
GuidanceWeights = Literal["conditional", "separate"]
"""Weights of the experts in v_null: those of the condition, p(k | x, c), or those of the null condition, p(k | x)."""
GuidanceName = Literal["classifier-free", "autoguidance"]
"""What guidance moves away from: the velocity with the null condition, or that of the weak network."""
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
Split = Literal["train", "validation"]
StageName = Literal["ingest", "features", "latents", "patches", "clusters", "text", "shards"]
SolverName = Literal["euler", "heun", "flow-euler", "flow-heun", "dpm++", "unipc"]

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)
SOLVERS: tuple[str, ...] = get_args(SolverName)
OWN_SOLVERS = ("euler", "heun")
"""Those without a diffusers scheduler."""


class ObjectiveParts(TypedDict, total=False):
    """The fields of `atoll.flow.Objective` that a named objective sets."""

    schedule: ScheduleName
    prediction: Prediction
    times: TimesName
    time_mean: float
    time_std: float
    weighting: WeightingName


OBJECTIVES: dict[str, ObjectiveParts] = {
    # HDDM mixes experts of the objectives flow-matching and ddpm in one ensemble.
    "flow-matching": {"schedule": "linear", "prediction": "velocity"},
    "flow-matching-logit-normal": {"schedule": "linear", "prediction": "velocity", "times": "logit-normal"},
    "ddpm": {"schedule": "cosine", "prediction": "epsilon"},
    "ddpm-linear": {"schedule": "ddpm-linear", "prediction": "epsilon"},
    "ddpm-min-snr": {"schedule": "cosine", "prediction": "epsilon", "weighting": "min-snr"},
    "x0": {"schedule": "linear", "prediction": "x0", "weighting": "as-velocity"},
    "v-prediction": {"schedule": "cosine", "prediction": "v_prediction"},
    # x0 prediction in the variance-exploding form, with the noise levels of EDM (Karras et al. 2022, table 1:
    # P_mean = -1.2, P_std = 1.2). It is not EDM: the network has no preconditioning, and the weights are capped.
    "ve-x0": {
        "schedule": "edm",
        "prediction": "x0",
        "times": "log-normal",
        "time_mean": -1.2,
        "time_std": 1.2,
        "weighting": "as-epsilon",
    },
}
"""Objectives by name. Fields that are left out have the defaults of `atoll.flow.Objective`."""

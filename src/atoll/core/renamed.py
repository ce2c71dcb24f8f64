"""Old names of configuration keys, presets, objectives and command-line options, with the new ones, for errors.

Nothing accepts an old name. A user who upgrades gets the new name in the error instead of a guess.
"""

from atoll.core.errors import AtollError

_JOBS = ("train", "router", "monolith", "student")

KEYS: dict[str, str] = {
    **{f"{job}.samples": f"{job}.total_images" for job in _JOBS},
    **{f"{section}.batch": f"{section}.batch_size" for section in (*_JOBS, "features", "latents", "text")},
    **{f"{job}.decay": f"{job}.lr_schedule" for job in ("train", "router", "monolith")},
    **{f"{job}.warmup": f"{job}.warmup_images" for job in ("train", "monolith")},
    "train.accumulate": "train.grad_accum_steps",
    "train.clip": "train.max_grad_norm",
    "train.checkpointing": "train.activation_checkpointing",
    "train.condition": "train.conditioning",
    "router.told": "router.conditioning",
    "train.condition_dropout": "train.cfg_dropout",
    "train.init": "train.init_from",
    "train.grid_every": "train.sample_every",
    "train.grid_size": "train.sample_count",
    "train.grid_guidance": "train.sample_guidance_scale",
    "data.held_out": "data.val_fraction",
    "clusters.fine": "clusters.num_fine",
}
"""Dotted keys of atoll.yaml and of `--section.key VALUE`."""

PRESETS: dict[str, str] = {"pictures": "images"}
"""Presets of `atoll init`."""

OBJECTIVES: dict[str, str] = {"edm": "ve-x0"}
"""Named objectives."""

_SAMPLING = {"--guidance": "--guidance-scale", "--batch": "--batch-size", "--resident": "--max-loaded-experts"}
OPTIONS: dict[str, dict[str, str]] = {
    "sample": {
        **_SAMPLING,
        "--count": "--num-images",
        "--trace": "--save-routing",
        "--quantise": "--quantize",
    },
    "evaluate": {
        **_SAMPLING,
        "--samples": "--num-images",
        "--references": "--num-real",
        "--followed": "--num-trajectories",
        "--held-out": "--num-val",
        "--allow-few": "--allow-small",
        "--skip": "--without",
    },
    "report": {"--guidance": "--guidance-scale"},
    "serve": {
        "--batch": "--batch-size",
        "--resident": "--max-loaded-experts",
        "--quantise": "--quantize",
        "--device": "--devices",
    },
    "prepare": {"--shard": "--worker"},
    "launch": {"--shares": "--prepare-workers", "--at-once": "--max-parallel"},
    "export": {"--licence": "--license"},
}
"""Options of the verbs of `atoll`."""


def check_arguments(verb: str, arguments: list[str]) -> None:
    """Raise an error with the new name if a command line has an old option or an old preset."""
    options = OPTIONS.get(verb, {})
    before = ""
    for argument in arguments:
        if argument == "--":
            return
        name, _, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in options:
            raise AtollError(f"{name} is now {options[name]}")
        preset = argument if before == "--preset" else value if name == "--preset" else ""
        if verb == "init" and preset in PRESETS:
            raise AtollError(f"the preset {preset!r} is now {PRESETS[preset]!r}")
        before = argument

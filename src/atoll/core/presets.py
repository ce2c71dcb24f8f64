"""Presets to start a run from: the built-in emoji, your own images, and the experiments of the papers.

`NOTES` gives the origin of a preset's settings; `atoll init` writes it into the comments. A setting that no paper
states is marked as our choice. `PUBLISHED` has the costs that `atoll train RUN --dry-run` prints next to its estimate.
"""

from dataclasses import dataclass

from atoll.core.names import ObjectiveParts

PartialConfig = dict[str, object]
"""A part of a configuration, as in atoll.yaml. `config.resolve` checks every key and value, and adds the defaults: the
objective is flow matching, for example."""
EXPERTS = 8
"""Number of experts in DDM, Paris and HDDM."""
DDM_STEPS = 800_000
"""Optimizer steps of the DDM experiments: FID was published every 100,000 up to here."""


def half_life(decay: float, batch_size: int) -> float:
    """Return the half-life in images of an EMA with this decay per step."""
    # decay^n = 1/2 has n = ln 2 / -ln(decay), about ln 2 / (1 - decay) for a decay near 1.
    return round(0.6931471805599453 / (1 - decay)) * float(batch_size)


_AUTOENCODER = {"autoencoder": "stabilityai/sd-vae-ft-mse"}
_PHOTOGRAPHS: PartialConfig = {
    "features": {"model": "facebook/dinov2-large"},
    "clusters": {"count": EXPERTS, "num_fine": 1024},
    "latents": _AUTOENCODER,
    "text": {"encoder": "openai/clip-vit-large-patch14", "max_tokens": 77},
}
_OBJECTIVE = {"default": "flow-matching-logit-normal"}
"""The objective of runs on your own images and on emoji; `NOTES` has its measurement."""
_SCALED = {**_AUTOENCODER, "normalization": "scale"}
"""Latents scaled as in DiT and Paris, so that released networks can initialize an expert or join the ensemble."""
# Common to the presets for GPUs. Intervals are in images, and are orders of magnitude: at 200 images per second, a log
# line every minute, and a checkpoint and previews every 1.5 hours.
_TRAIN: PartialConfig = {
    "beta2": 0.999,
    "precision": "bfloat16",
    "save_every": 1_000_000,
    "log_every": 10_000,
    "sample_every": 1_000_000,
    "workers": 8,
}

_MIDDLE_TIMES: ObjectiveParts = {"times": "logit-normal", "time_mean": 0.4}
"""Flow matching with most training times around t = 0.6, where the image takes shape: a short training shows sooner."""
_X0_MIDDLE_TIMES: ObjectiveParts = {**_MIDDLE_TIMES, "prediction": "x0", "weighting": "as-velocity"}
"""x0 prediction at the same times. It has the best images of a short training, and DDPM the worst (recipes/demo)."""

PRESETS: dict[str, PartialConfig] = {
    "emoji": {
        "features": {"resolution": 128},
        "clusters": {"count": 4},
        "text": {"max_tokens": 24},
        "experts": _OBJECTIVE,
        "networks": {"default": "ModernDiT-XS/2"},
        "router": {"network": "DiT-XS/2", "conditioning": "auto"},
    },
    # Your own images on one GPU: networks from the hub, and a router conditioned on whatever the data has.
    "images": {
        **_PHOTOGRAPHS,
        "data": {"source": "path/to/images", "resolution": 256, "buckets": "auto", "val_fraction": 0.01, "workers": 8},
        "features": {"model": "facebook/dinov2-base"},
        "experts": _OBJECTIVE,
        "networks": {"default": "ModernDiT-B/2"},
        "train": {
            **_TRAIN,
            "total_images": 6_400_000,
            "batch_size": 128,
            "lr": 2e-4,
            "warmup_images": 128_000,
            "ema": {"ema": half_life(0.9998, 128)},
            "save_every": 200_000,
            "sample_every": 400_000,
        },
        "router": {"network": "DiT-S/2", "conditioning": "auto"},
    },
    # Your own images as LoRA experts of one base model, on one GPU. `atoll init --base` checks and names the base.
    "base": {
        "data": {"source": "path/to/images", "resolution": 1024, "val_fraction": 0.01, "workers": 8},
        "features": {"model": "facebook/dinov2-base"},
        "clusters": {"count": 4},
        "networks": {"default": {"base": "path/to/base", "lora": {"rank": 16, "alpha": 16}}},
        "train": {
            **_TRAIN,
            "total_images": 20_000,
            "batch_size": 4,
            "lr": 1e-4,
            "warmup_images": 400,
            "ema": {"ema": half_life(0.999, 4)},
            "activation_checkpointing": True,
            "compile": False,
            "save_every": 2_000,
            "log_every": 200,
            "sample_every": 0,
        },
        "router": {"network": "DiT-S/2", "conditioning": "auto", "total_images": 200_000, "batch_size": 64},
    },
    # `atoll demo`, which takes minutes on a CPU: few images of one style, small networks, a router conditioned on the
    # prompt. All sizes are choices for a few minutes of training, and the learning rate is high for the same reason.
    "demo": {
        "data": {
            "source": "emoji:styles=twemoji;categories=animals-nature,flags,food-drink,smileys-emotion;skin-tones=no",
            "val_fraction": 0.1,
        },
        "features": {"resolution": 128},
        "clusters": {"count": 5},
        "text": {"max_tokens": 16},
        # Two objectives, to show that they mix. recipes/demo has the cost.
        "experts": {"default": _X0_MIDDLE_TIMES, 1: _MIDDLE_TIMES},
        "networks": {"default": {"name": "DiT-XS/4", "width": 256, "depth": 4, "heads": 4}},
        "train": {
            "total_images": 24_000,
            "batch_size": 16,
            "lr": 2e-3,
            "warmup_images": 800,
            "lr_schedule": "cosine",
            "ema": {"ema": 1500.0},
            "save_every": 8_000,
            "log_every": 800,
            "sample_every": 0,
        },
        "router": {
            "network": {"name": "DiT-XS/4", "width": 128, "depth": 4, "heads": 2},
            "conditioning": "pooled",
            # The two clusters of flags have similar captions. With a third of these images, the router confused them.
            "total_images": 72_000,
            "batch_size": 32,
        },
    },
    # DDM section 4: 8 experts with an eighth of the monolith's batch of 256 each, for 800,000 steps.
    "imagenet256": {
        "preset": "imagenet256",
        **_PHOTOGRAPHS,
        "latents": _SCALED,
        "data": {"source": "path/to/imagenet/train", "resolution": 256, "val_fraction": 0.01, "workers": 16},
        "text": {"encoder": "none"},
        "networks": {"default": {"name": "DiT-XL/2", "modulation": "zero", "num_classes": 1000}},
        "train": {
            **_TRAIN,
            "total_images": DDM_STEPS * 256 // EXPERTS,
            "batch_size": 256 // EXPERTS,
            "lr": 1e-4,
            "warmup_images": 0,
            "ema": {"ema": half_life(0.9999, 256 // EXPERTS)},
            "conditioning": "label",
        },
        "router": {"network": "DiT-B/2", "total_images": 60_000_000, "batch_size": 256, "lr": 1e-4},
        "student": {"total_images": DDM_STEPS * 64, "batch_size": 64},
    },
    # Paris and HDDM: 8 experts of 606 M parameters, two of them DDPM, on 11 million images.
    "laion256": {
        "preset": "laion256",
        **_PHOTOGRAPHS,
        "latents": _SCALED,
        "data": {"source": "path/to/laion-aesthetics/*.tar", "resolution": 256, "val_fraction": 0.001, "workers": 16},
        "experts": {"default": "flow-matching", 0: "ddpm", 3: "ddpm"},
        "networks": {"default": "DiT-XL/2"},
        "train": {
            **_TRAIN,
            "total_images": 120_000 * 32,
            "batch_size": 32,
            "grad_accum_steps": 2,
            "lr": 2e-5,
            "warmup_images": 0,
            "ema": {"ema": half_life(0.9999, 32)},
            "conditioning": "text",
        },
        "router": {
            "network": "DiT-B/2",
            "total_images": 25 * 11_000_000,
            "batch_size": 256,
            "lr": 5e-5,
            "lr_schedule": "cosine",
        },
    },
    # The largest experiment of DDM: 8 MMDiT experts of 3 billion parameters, each on a node of 8 GPUs.
    "ddm24b": {
        "preset": "ddm24b",
        **_PHOTOGRAPHS,
        "data": {"source": "path/to/laion-aesthetics/*.tar", "resolution": 256, "val_fraction": 0.0001, "workers": 32},
        "experts": {"default": "flow-matching-logit-normal"},
        "networks": {
            "default": {
                "_class_name": "SD3Expert",
                "sample_size": 32,
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 26,
                "attention_head_dim": 64,
                "num_attention_heads": 28,
                "joint_attention_dim": 768,
                "caption_projection_dim": 1792,
                "pooled_projection_dim": 768,
                "pos_embed_max_size": 96,
                "null_tokens": 77,
            }
        },
        "train": {
            **_TRAIN,
            "total_images": DDM_STEPS * 1024,
            "batch_size": 1024,
            "lr": 1e-4,
            "warmup_images": 1_024_000,
            "ema": {"ema": half_life(0.9999, 1024)},
            "conditioning": "text",
            "activation_checkpointing": True,
            "parallel": "fsdp2",
            "save_every": 5_000_000,
            "sample_every": 20_000_000,
        },
        "router": {"network": "DiT-B/2", "total_images": 400_000_000, "batch_size": 1024, "lr": 1e-4},
    },
}

SUMMARIES = {
    "emoji": "built-in emoji, 64 pixels, 4 experts; a CPU is enough",
    "images": "your own images, 256 pixels, 8 experts from scratch; a 24 GB GPU",
    "base": "your own images as LoRA experts of a base model: use --base",
    "demo": "built-in emoji, 5 small experts; trains in minutes on a CPU",
    "imagenet256": "8 DiT-XL/2 experts on ImageNet classes, as in DDM",
    "laion256": "8 experts of two objectives on LAION images, as in Paris and HDDM",
    "ddm24b": "8 experts of 3 billion parameters, as in DDM's largest model",
}
"""A line about each preset, for `atoll init --help`."""

_OURS = "our choice: not published"
_COMMON = {
    **dict.fromkeys(("data.val_fraction", "train.beta2", "train.precision", "train.warmup_images"), _OURS),
    **dict.fromkeys(("train.weight_decay", "train.max_grad_norm"), _OURS),
    "clusters.count": "DDM, Paris and HDDM: 8; DDM found 4 and 16 worse",
    "clusters.num_fine": "1024 in the clustering code that DDM cites",
    "train.init_from": "HDDM initializes from a DiT checkpoint: atoll convert SRC DST --to flow-matching, and DST here",
    "router.network": "DDM, Paris and HDDM: DiT-B/2",
}
_DDM = {
    **dict.fromkeys(("latents.autoencoder", "train.lr", "train.cfg_dropout", "router.lr", "router.batch_size"), _OURS),
    "features.model": "DDM: DINOv2; its size is our choice",
    "train.ema": f"{_OURS}; decay 0.9999 per step",
}
_MEASURED = {
    "networks": "ModernDiT needs 0.62 (CIFAR-10) and 0.65 (emoji) of DiT's FLOPs to the same error: recipes/fast",
    "experts": "logit-normal times: KID 9 % lower on CIFAR-10, one seed, the error on emoji not higher: recipes/fast",
}
NOTES: dict[str, dict[str, str]] = {
    "emoji": _MEASURED,
    "images": _MEASURED,
    "base": {
        **dict.fromkeys(
            ("clusters.count", "train.total_images", "train.lr", "train.ema", "router.total_images"), _OURS
        ),
        "data.resolution": "the default of the base's pipeline",
        "latents.autoencoder": "from networks.default",
        "text.encoder": "from networks.default",
        "networks": "the base of all experts; each trains its own adapter",
        "train.batch_size": "our choice, with activation_checkpointing, for one GPU with 24 GB",
        "train.compile": "our choice: a base was not compiled in any test",
    },
    "imagenet256": {
        **_COMMON,
        **_DDM,
        "latents.normalization": "our choice: as in DiT, whose checkpoints then fit train.init_from",
        "text.encoder": "our choice: class labels; DDM's FLOPs suggest that its network had text layers here too",
        "networks": "DDM: DiT-XL/2; AdaLN-Zero as in DiT is our choice",
        "train.total_images": "DDM: 800,000 steps",
        "train.batch_size": "DDM: the monolith's 256 divided by 8 experts",
        "router.total_images": "our choice: about 4 % of the experts' FLOPs, as DDM states for its router",
        "student.batch_size": "DDM: a quarter of the batch",
        "student.total_images": _OURS,
    },
    "laion256": {
        **_COMMON,
        "features.model": "Paris: DINOv2 ViT-L/14",
        "latents.autoencoder": "Paris",
        "latents.normalization": "Paris: latents times 0.18215",
        "text.encoder": "Paris: CLIP ViT-L/14, 77 tokens",
        "experts": "HDDM: 2 DDPM to 6 flow matching, DDPM for clusters 0 and 3",
        "networks": "Paris and HDDM: DiT-XL/2 with AdaLN-Single, 606 M",
        "train.total_images": "our choice: 120,000 steps per expert; the Paris release states about as many in total",
        "train.batch_size": "Paris: 16 with 2 accumulation steps",
        "train.lr": "Paris",
        "train.ema": "Paris: decay 0.9999 per step",
        "train.precision": "our choice; Paris: float16 with loss scaling",
        "train.cfg_dropout": "Paris",
        "router.total_images": "Paris and HDDM: 25 epochs of 11 million",
        "router.batch_size": "Paris: 64 with 4 accumulation steps",
        "router.lr": "Paris",
        "router.lr_schedule": "Paris",
    },
    "ddm24b": {
        **_COMMON,
        **_DDM,
        "text.encoder": _OURS,
        "experts": "flow matching as in DDM; the distribution of times is our choice",
        "networks": "DDM: MMDiT of 3 B; depth and width are our choice, near the proportions of SD3",
        "train.total_images": "DDM: 800,000 steps",
        "train.batch_size": "our choice: 1024 per expert comes near the published GPU-days",
        "train.parallel": "our choice; DDM: one node of 8 GPUs per expert",
        "router.total_images": _OURS,
    },
}


@dataclass(frozen=True)
class Published:
    """The cost of an experiment as its paper states it; None where the paper does not."""

    source: str
    parameters: str
    forward_gflops: str | None
    total_flops: str | None
    gpu_days: str | None


PUBLISHED: dict[str, Published] = {
    "imagenet256": Published(
        "DDM (arXiv 2501.05450)",
        "8 DiT-XL/2; router 158 M",
        "308 per expert",
        "1.9e20, from 308 GFLOPs, batch 256 and 800,000 steps",
        None,
    ),
    "laion256": Published(
        "Paris (arXiv 2510.03434), HDDM (arXiv 2603.06741)",
        "8 x 605 M; router 129 M",
        None,
        None,
        "72 A100-days (HDDM), 120 A40-days (Paris)",
    ),
    "ddm24b": Published(
        "DDM (arXiv 2501.05450)",
        "8 x 3 B",
        None,
        "4.3e22, read off a plot; more than GPUs of the time can do in the published GPU-days",
        "less than a week on 8 nodes of 8 GPUs; HDDM states 1176 A100-days for DDM",
    ),
}

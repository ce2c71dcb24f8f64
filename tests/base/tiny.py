"""Tiny random pipelines of diffusers, with text encoders and tokenizers, built offline: prompt in, image out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import tiny_base
import torch
import transformers
from tiny_base import VOCABULARY
from torch import nn

CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LAYER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
"""Common arguments of the text encoders that are language models."""
HEADS: dict[str, Any] = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
PACKED: dict[str, Any] = {**HEADS, "patch_size": 1, "in_channels": 16, "num_single_layers": 1}
GRID: dict[str, Any] = {
    "sample_size": 32, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8, "num_attention_heads": 4,
    "joint_attention_dim": 32, "caption_projection_dim": 32,
}  # fmt: skip
"""Common arguments of networks: of tokens with single blocks, and of grids with text beside the image."""


# Tokenizer, text encoders, autoencoder and scheduler


def tokenizer(longest: int = 77) -> Any:
    """Return a tokenizer of bytes for a language model."""
    made = tiny_base.tokenizer(longest)
    made.chat_template = CHAT
    return made


def clip(projection: bool = False) -> nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        projection_dim=32, bos_token_id=1, eos_token_id=2, pad_token_id=0, hidden_act="gelu",
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config)


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=2))


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**{**LAYER, "num_hidden_layers": 3}, hidden_size=16, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def gemma() -> nn.Module:
    return transformers.Gemma2Model(transformers.Gemma2Config(**LAYER, hidden_size=8, head_dim=4))


def vae(count: int = 2, **more: Any) -> nn.Module:
    levels = {"down_block_types": ("DownEncoderBlock2D",) * count, "up_block_types": ("UpDecoderBlock2D",) * count}
    settings = {"shift_factor": 0.06, "scaling_factor": 1.5, "use_quant_conv": False, "use_post_quant_conv": False}
    return diffusers.AutoencoderKL(**levels, block_out_channels=(4,) * count, norm_num_groups=2, **{**settings, **more})


def scheduler(**settings: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def unet(**more: Any) -> nn.Module:
    settings = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (4, 8), "layers_per_block": 1, "norm_num_groups": 1, "sample_size": 32,
        "cross_attention_dim": 32, "attention_head_dim": (2, 4), "use_linear_projection": True,
    }  # fmt: skip
    return diffusers.UNet2DConditionModel(**{**settings, **more})


# Pipelines


def flux() -> Any:
    return tiny_base.tiny_base()


def sd3() -> Any:
    net = diffusers.SD3Transformer2DModel(**GRID, num_layers=1, patch_size=1, pooled_projection_dim=64)
    text = (clip(True), tokenizer(), clip(True), tokenizer(), t5(), tokenizer(48))
    return diffusers.StableDiffusion3Pipeline(net, scheduler(shift=3.0), vae(), *text)


def chroma() -> Any:
    approximator = {"approximator_hidden_dim": 32, "approximator_layers": 1, "approximator_num_channels": 16}
    net = diffusers.ChromaTransformer2DModel(**PACKED, joint_attention_dim=32, axes_dims_rope=(4, 4, 8), **approximator)
    return diffusers.ChromaPipeline(scheduler(), vae(), t5(), tokenizer(48), net)


def aura() -> Any:
    layers = {"num_mmdit_layers": 1, "num_single_dit_layers": 1}
    net = diffusers.AuraFlowTransformer2DModel(**GRID, **layers, patch_size=2, pos_embed_max_size=256)
    return diffusers.AuraFlowPipeline(tokenizer(), t5(), vae(), net, scheduler())


def lumina2() -> Any:
    net = diffusers.Lumina2Transformer2DModel(
        sample_size=4, in_channels=4, hidden_size=8, num_layers=2, num_attention_heads=1, num_kv_heads=1,
        multiple_of=16, axes_dim_rope=(4, 2, 2), cap_feat_dim=8,
    )  # fmt: skip
    return diffusers.Lumina2Pipeline(net, scheduler(shift=6.0), vae(), gemma(), tokenizer())


def sana() -> Any:
    net = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
    )  # fmt: skip
    sides = {
        "block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8), "layers_per_block": (1, 1),
        "qkv_multiscales": ((), (5,)),
    }  # fmt: skip
    both = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    blocks = {"downsample_block_type": "conv", "upsample_block_type": "interpolate"}
    autoencoder = diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=2, **both, **blocks)
    return diffusers.SanaPipeline(tokenizer(), gemma(), autoencoder, net, scheduler(shift=3.0))


def zimage() -> Any:
    net = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
    )  # fmt: skip
    with torch.no_grad():  # left empty by its constructor
        net.x_pad_token.normal_()
        net.cap_pad_token.normal_()
    return diffusers.ZImagePipeline(scheduler(shift=3.0), vae(), qwen3(), tokenizer(512), net)


def klein() -> Any:
    net = diffusers.Flux2Transformer2DModel(
        **PACKED, joint_attention_dim=16, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False
    )
    levels = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    sizes = {"block_out_channels": (4,), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 1}
    plain = {"use_quant_conv": False, "use_post_quant_conv": False}
    autoencoder = diffusers.AutoencoderKLFlux2(**levels, **sizes, **plain)
    shifted = scheduler(use_dynamic_shifting=True)
    return diffusers.Flux2KleinPipeline(shifted, autoencoder, qwen3(), tokenizer(512), net)


def qwenimage() -> Any:
    sizes = {**HEADS, "num_attention_heads": 3, "patch_size": 2, "in_channels": 16, "out_channels": 4}
    net = diffusers.QwenImageTransformer2DModel(**sizes, joint_attention_dim=16, axes_dims_rope=(8, 4, 4))
    autoencoder = diffusers.AutoencoderKLQwenImage(
        base_dim=24, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.1] * 4, latents_std=[1.1] * 4,
    )  # fmt: skip
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**LAYER, "hidden_size": 16, "rope_scaling": rope, "max_position_embeddings": 4096},
        vision_config=vision, vocab_size=VOCABULARY, vision_end_token_id=5, vision_start_token_id=4, vision_token_id=6,
    )  # fmt: skip
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    shifted = scheduler(use_dynamic_shifting=True)
    return diffusers.QwenImagePipeline(shifted, autoencoder, encoder, tokenizer(1024), net)


def hidream(side: int = 32) -> Any:
    net = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=4, caption_channels=[32, 16], text_emb_dim=64, num_routed_experts=4,
        num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(side, side), llama_layers=(0, 1),
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LAYER, hidden_size=16, output_hidden_states=True))
    text = (clip(True), tokenizer(), clip(True), tokenizer(), t5(), tokenizer(48), llama, tokenizer())
    made = diffusers.HiDreamImagePipeline(scheduler(shift=3.0), vae(scaling_factor=0.3), *text, net)
    made.default_sample_size = side  # of latents; it scales all images to this size. In a folder it is 128.
    return made


def prx() -> Any:
    from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    net = PRXTransformer2DModel(
        patch_size=1, in_channels=4, context_in_dim=8, hidden_size=8, mlp_ratio=2.0, num_heads=2, depth=1,
        axes_dim=[2, 2],
    )  # fmt: skip
    part = transformers.T5GemmaModuleConfig(**LAYER, hidden_size=8, head_dim=4, query_pre_attn_scalar=4)
    config = transformers.T5GemmaConfig(encoder=part, decoder=part, is_encoder_decoder=False, vocab_size=VOCABULARY)
    return diffusers.PRXPipeline(net, scheduler(), T5GemmaEncoder(config.encoder), tokenizer(), vae())


def pixart_sigma(kind: Any = diffusers.PixArtSigmaPipeline, **sizes: Any) -> Any:
    net = diffusers.PixArtTransformer2DModel(
        num_layers=1, attention_head_dim=8, num_attention_heads=3, caption_channels=32, cross_attention_dim=24,
        **{"sample_size": 32, **sizes},
    )  # fmt: skip
    multistep = diffusers.DPMSolverMultistepScheduler(beta_end=0.02)
    return kind(tokenizer(48), t5(), vae(shift_factor=None), net, multistep)


def pixart_alpha() -> Any:
    return pixart_sigma(diffusers.PixArtAlphaPipeline, sample_size=128, use_additional_conditions=True)


def hunyuan_dit() -> Any:
    net = diffusers.HunyuanDiT2DModel(
        sample_size=32, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
        cross_attention_dim=32, cross_attention_dim_t5=32, pooled_projection_dim=16, hidden_size=24,
        activation_fn="gelu-approximate", text_len=77, text_len_t5=256,
    )  # fmt: skip
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **sizes))
    table = diffusers.DDPMScheduler(beta_schedule="scaled_linear", beta_end=0.03, prediction_type="v_prediction")
    text = {"text_encoder_2": t5(), "tokenizer_2": tokenizer(256), "requires_safety_checker": False}
    return diffusers.HunyuanDiTPipeline(vae(4, shift_factor=None), bert, tokenizer(), net, table, None, None, **text)


def stable_diffusion(**settings: Any) -> Any:
    table = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, **settings}
    multistep = diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1, **table)
    parts = vae(shift_factor=None), clip(), tokenizer(), unet(), multistep
    return diffusers.StableDiffusionPipeline(*parts, None, None, requires_safety_checker=False)


def stable_diffusion_xl() -> Any:
    net = unet(
        cross_attention_dim=64, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )  # fmt: skip
    scaled = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    text = clip(), clip(True), tokenizer(), tokenizer()
    return diffusers.StableDiffusionXLPipeline(vae(shift_factor=None), *text, net, scaled, add_watermarker=False)


FLOWS = (flux, sd3, chroma, aura, lumina2, sana, zimage, klein, qwenimage, hidream, prx)
NOISE = (pixart_sigma, pixart_alpha, hunyuan_dit, stable_diffusion, stable_diffusion_xl)
FAMILIES: dict[str, Callable[[], Any]] = {made.__name__: made for made in (*FLOWS, *NOISE)}
"""Those whose networks predict velocities, and those that predict noise or v."""
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"max_sequence_length": 48} for name in ("flux", "sd3", "chroma", "sana", "aura", "hidream", "zimage")},
    **{name: {"max_sequence_length": 48} for name in ("pixart_sigma", "pixart_alpha")},
    "klein": {"max_sequence_length": 64, "text_encoder_out_layers": [1]},
    **{name: {"max_sequence_length": 256} for name in ("qwenimage", "lumina2")},
}
"""Options of the pipelines' calls: short prompts, and layers that the tiny encoders have."""


def pipeline(family: str, seed: int = 0) -> Any:
    """Return the pipeline of a family, the same one for the same seed."""
    torch.manual_seed(seed)
    made = FAMILIES[family]()
    made.set_progress_bar_config(disable=True)
    for part in made.components.values():
        if isinstance(part, nn.Module):
            part.eval()
    return made


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """Save the pipeline of a family into a folder."""
    pipeline(family, seed).save_pretrained(folder)
    return folder

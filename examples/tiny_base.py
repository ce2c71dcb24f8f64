"""Write a tiny text-to-image pipeline with random weights, to try experts of a base model on a CPU without downloads.

    python examples/tiny_base.py tiny-base

It has the parts of a real one: two text encoders with tokenizers, an autoencoder, a scheduler of flow matching and a
transformer of packed tokens. Its images are noise.
"""

import sys
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
VOCABULARY = 300
"""More than the special tokens and the 256 bytes."""
WIDTH = 32


def tokenizer(longest: int) -> Any:
    """Return a tokenizer of bytes."""
    tokens = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    inner = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=longest, **names)


def tiny_base() -> FluxPipeline:
    """Return the pipeline, with about 80,000 parameters in its transformer."""
    ends = {"pad_token_id": 0, "eos_token_id": 2}
    clip = CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        projection_dim=WIDTH, bos_token_id=1, **ends,
    )  # fmt: skip
    t5 = T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=WIDTH, num_layers=2, num_heads=4, **ends)
    autoencoder = AutoencoderKL(
        block_out_channels=(4, 4), latent_channels=4, norm_num_groups=2, use_quant_conv=False,
        use_post_quant_conv=False, scaling_factor=1.5, shift_factor=0.06, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    encoders = CLIPTextModel(clip), tokenizer(77), T5EncoderModel(t5), tokenizer(512)
    return FluxPipeline(scheduler, autoencoder, *encoders, transformer)


if __name__ == "__main__":
    torch.manual_seed(0)
    tiny_base().save_pretrained(sys.argv[1])

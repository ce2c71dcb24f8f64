"""Text alignment with a small CLIP, against transformers itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.apps.evaluate.extractors import open_alignment, open_vision
from atoll.core.errors import AtollError

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SETTINGS = {"size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.5]}


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "a", "red", "green", "apple"])}
    text = {
        **SMALL,
        "vocab_size": 6,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "max_position_embeddings": 8,
    }
    vision = {**SMALL, "image_size": 32, "patch_size": 16}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)).save_pretrained(tmp_path)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def test_alignment_is_the_cosine_similarity_of_clip(clip: Path) -> None:
    from transformers import CLIPModel

    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    model = CLIPModel.from_pretrained(clip).eval()
    x = (torch.from_numpy(pixels) / 255 - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor([0.2, 0.25, 0.5])
    tokens = torch.tensor([[2, 3, 5, 0, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0, 0, 0]])
    with torch.inference_mode():
        output = model(input_ids=tokens, attention_mask=(tokens > 0).long(), pixel_values=x.permute(0, 3, 1, 2))
    expected = (output.image_embeds * output.text_embeds).sum(1)
    alignment = open_alignment(str(clip))
    assert alignment(pixels, ["a red apple", "green apple"]).allclose(expected, atol=1e-5)
    assert len(alignment.weights) == 64
    # The same model is a feature network, whose features are not normalized to length 1.
    features = open_vision(str(clip))(pixels)
    assert torch.nn.functional.normalize(features).allclose(output.image_embeds, atol=1e-5)
    assert not features.norm(dim=1).allclose(torch.ones(2), atol=1e-2)


def test_a_model_without_a_text_encoder_is_an_error() -> None:
    with pytest.raises(AtollError, match="no image-text model"):
        open_alignment("efficientnet-lite0")

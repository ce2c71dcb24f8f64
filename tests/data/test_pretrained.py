"""Feature networks, autoencoders and text encoders: real weights from pip, and small ones of every supported kind."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import save_file

from atoll.core.device import device
from atoll.core.errors import AtollError
from atoll.encoders import efficientnet
from atoll.encoders.autoencoder import Statistics, open_codec
from atoll.encoders.pretrained import fingerprint, load_pretrained, model_folder
from atoll.encoders.text import open_text_encoder
from atoll.encoders.vision import open_extractor
from shapes import draw


def shape_images(side: int, kinds: tuple[str, ...] = ("circle", "square", "triangle")) -> np.ndarray:
    chance = random.Random(1)
    return np.stack([np.asarray(draw(kind, chance).resize((side, side))) for kind in kinds])


def save_vision_model(folder: Path, network: object, size: dict[str, int]) -> None:
    network.save_pretrained(folder)  # type: ignore[attr-defined]
    settings = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.5], "size": size, "rescale_factor": 1 / 255}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


# Where networks run


def test_images_are_encoded_in_parts_that_do_not_depend_on_the_cores() -> None:
    """Nine images of 224 pixels are three parts: in order, equal for one and two threads, and close to one batch."""
    extractor, before = open_extractor("efficientnet-lite0"), torch.get_num_threads()
    pixels = shape_images(224, ("circle", "square", "triangle") * 3)
    pixels[3:] = 255 - pixels[3:]
    pixels[6:] //= 2
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(extractor(pixels))
            assert torch.get_num_threads() == threads
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.get_num_threads).result() == threads, "a thread that starts later"
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    one_by_one = torch.cat([extractor(pixels[row : row + 1]) for row in range(9)])
    assert_allclose(found[0], one_by_one, atol=1e-5)
    assert (one_by_one @ one_by_one.T - torch.eye(9)).max() < 0.999, "the images must differ"


def test_without_a_driver_a_cuda_build_runs_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend the ordinary wheel of torch on a machine without a GPU: the build has CUDA, and using it fails."""

    def no_driver() -> int:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceIndex", no_driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert device() == torch.device("cpu")


def test_an_accelerator_that_can_be_used_is_named_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceIndex", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device() == torch.device("cuda", 1)


# Models that bring code of their own


def hostile_model(folder: Path, model_type: str, tokenizer: bool) -> Path:
    """Write a model folder whose classes are in its own Python file, which leaves a trace when it is run."""
    folder.mkdir()
    trace = folder.parent / "trace"
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Model: ...\nclass Config: ...\n")
    names = ("AutoConfig", "AutoModel", "AutoModelForTextEncoding", "AutoTokenizer")
    classes = {name: "code.Config" if name == "AutoConfig" else "code.Model" for name in names}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": classes}))
    if tokenizer:
        settings = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["code.Model", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("model_type", ["strange", "resnet"])
@pytest.mark.parametrize("loader", [open_extractor, lambda folder: open_text_encoder(folder, 8)])
def test_code_of_a_model_is_not_run_and_no_prompt_appears(
    model_type: str, loader: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("transformers asked whether to run the code")

    monkeypatch.setattr("builtins.input", ask)
    folder = hostile_model(tmp_path / "model", model_type, tokenizer=True)
    with pytest.raises((AtollError, OSError)) as refusal:
        loader(str(folder))
    if model_type == "strange":
        assert f"{folder} needs custom Python code, which Atoll never runs" in str(refusal.value)
    assert not (tmp_path / "trace").exists()


def test_code_of_a_tokenizer_is_not_run_and_no_prompt_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = hostile_model(tmp_path / "model", "strange", tokenizer=True)
    with pytest.raises(AtollError, match="needs custom Python code, which Atoll never runs"):
        load_pretrained(AutoTokenizer, folder)
    assert not (tmp_path / "trace").exists()


# EfficientNet-Lite0


def test_efficientnet_gives_the_known_scores() -> None:
    """Values of the package that the weights were published with, for an input anyone can make."""
    ramp = torch.linspace(-1, 1, 3 * 224 * 224).view(1, 3, 224, 224)
    with torch.inference_mode():
        network = efficientnet.load()
        scores, classes = network._fc(network(ramp))[0].topk(3)
    assert classes.tolist() == [701, 437, 540]
    assert_allclose(scores.numpy(), [3.4702, 3.4477, 3.2483], atol=2e-4)


def test_fusing_does_not_change_the_output() -> None:
    plain = efficientnet.EfficientNetLite0()
    plain.load_state_dict(torch.load(efficientnet.weights_file(), weights_only=True))
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert_allclose(efficientnet.load()(x), plain.eval()(x), atol=1e-4)


def test_features_are_unit_vectors_and_distinguish_shapes() -> None:
    extractor = open_extractor("efficientnet-lite0", 64)
    kinds = ("circle", "circle", "square", "square", "triangle", "triangle")
    features = extractor(shape_images(64, kinds))
    assert features.shape == (6, 1280)
    assert_allclose(features.norm(dim=1), 1, atol=1e-5)
    similar = features @ features.T
    similar.fill_diagonal_(0)
    assert similar.argmax(1).tolist() == [1, 0, 3, 2, 5, 4]


# transformers vision models


def test_a_dinov2_from_a_folder_is_given_the_pixels_of_its_preprocessor_config(tmp_path: Path) -> None:
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    network = Dinov2Model(
        Dinov2Config(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    )
    save_vision_model(tmp_path, network, {"shortest_edge": 28})
    extractor = open_extractor(str(tmp_path))
    assert extractor.side == 28
    pixels = shape_images(28)
    normal = (torch.from_numpy(pixels) / 255 - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor([0.2, 0.25, 0.5])
    with torch.inference_mode():
        expected = network.eval()(normal.permute(0, 3, 1, 2)).pooler_output
    assert_allclose(extractor(pixels), torch.nn.functional.normalize(expected, dim=1), atol=1e-5)
    assert open_extractor(str(tmp_path), resolution=42).side == 42


def test_a_whole_clip_gives_its_image_features(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=small, vision_config={**small, "image_size": 32, "patch_size": 16}, projection_dim=12
    )
    save_vision_model(tmp_path, CLIPModel(config), {"height": 32, "width": 32})
    features = open_extractor(str(tmp_path))(shape_images(32))
    assert features.shape == (3, 12)
    assert_allclose(features.norm(dim=1), 1, atol=1e-5)


def test_a_convolutional_model_gives_flat_features(tmp_path: Path) -> None:
    from transformers import ConvNextConfig, ConvNextModel

    save_vision_model(
        tmp_path,
        ConvNextModel(ConvNextConfig(hidden_sizes=[8, 8, 8, 20], depths=[1, 1, 1, 1])),
        {"shortest_edge": 32},
    )
    assert open_extractor(str(tmp_path))(shape_images(32)).shape == (3, 20)


def test_a_model_without_preprocessor_config_is_an_error(tmp_path: Path) -> None:
    from transformers import ConvNextConfig, ConvNextModel

    ConvNextModel(ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4)).save_pretrained(tmp_path)
    with pytest.raises(AtollError, match=r"no preprocessor_config.json"):
        open_extractor(str(tmp_path))


# Identity of networks


def test_the_fingerprint_depends_on_the_weights(tmp_path: Path) -> None:
    for name, value in (("one", 0.0), ("two", 0.0), ("three", 1.0)):
        (tmp_path / name).mkdir()
        save_file({"x": torch.full((2,), value)}, tmp_path / name / "model.safetensors")
    one, two, three = (fingerprint(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two != three
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(AtollError, match=r"no \*.safetensors file"):
        fingerprint(tmp_path / "pickle")


def test_an_unknown_model_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(AtollError, match=r"'./nowhere/at/all' is not a folder, and could not be downloaded"):
        model_folder("./nowhere/at/all")


# Autoencoders


def test_pixels_are_decoded_exactly() -> None:
    codec, pixels = open_codec("pixels"), shape_images(32)
    latents = codec.encode(pixels)
    assert list(latents) == ["mean"]
    assert latents["mean"].shape == (3, 3, 32, 32)
    assert latents["mean"].min() >= -1
    assert latents["mean"].max() == 1
    assert np.array_equal(codec.decode(latents["mean"].half()).numpy(), pixels)


def test_autoencoder_kl_returns_mean_and_std_of_the_posterior(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"block_out_channels": (8, 8), "norm_num_groups": 4}
    network = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        **blocks,
    ).eval()
    network.save_pretrained(tmp_path)
    codec, pixels = open_codec(str(tmp_path)), shape_images(32)
    latents = codec.encode(pixels)
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        posterior = network.encode(x).latent_dist
        decoded = network.decode(posterior.mean).sample
    assert latents["mean"].shape == (3, 4, 16, 16)
    assert_allclose(latents["mean"], posterior.mean, atol=1e-5)
    assert_allclose(latents["std"], posterior.std, atol=1e-5)
    expected = ((decoded + 1) * 127.5).round().clamp(0, 255).permute(0, 2, 3, 1)
    assert np.abs(codec.decode(latents["mean"]).numpy().astype(int) - expected.numpy()).max() <= 1


def test_autoencoder_tiny_has_no_std(tmp_path: Path) -> None:
    from diffusers import AutoencoderTiny

    blocks = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    layers = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    AutoencoderTiny(latent_channels=4, **blocks, **layers).save_pretrained(tmp_path)
    codec = open_codec(str(tmp_path))
    latents = codec.encode(shape_images(32))
    assert list(latents) == ["mean"]
    assert codec.decode(latents["mean"]).shape == (3, 32, 32, 3)


def test_another_autoencoder_class_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderK"}')
    with pytest.raises(AtollError, match=r"unknown autoencoder class 'AutoencoderK' .did you mean 'AutoencoderKL'"):
        open_codec(str(tmp_path))


def test_normalize_and_denormalize_are_inverse() -> None:
    statistics = Statistics((1.0, -2.0), (0.5, 4.0))
    latents = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    normal = statistics.normalize(latents)
    assert_allclose(normal[:, 1], (latents[:, 1] + 2) / 4, rtol=1e-6)
    assert_allclose(statistics.denormalize(normal), latents, atol=1e-6)


# Text encoders


def test_minilm_embeds_similar_captions_close_together() -> None:
    """Cosines that sentence-transformers gives for the same model."""
    encoder = open_text_encoder("minilm", max_tokens=16)
    states, mask, pooled = encoder(["red apple", "green apple", "grinning face", ""])
    assert states.shape == (4, 16, 384)
    assert mask.sum(1).tolist() == [4, 4, 4, 2]
    assert (states[~mask] == 0).all()
    assert_allclose(pooled.norm(dim=1), 1, atol=1e-5)
    cosine = pooled @ pooled.T
    assert_allclose([cosine[0, 1], cosine[0, 2]], [0.80, 0.09], atol=0.005)


def test_padding_and_other_captions_do_not_change_an_embedding() -> None:
    encoder = open_text_encoder("minilm", max_tokens=16)
    long = "a very long caption about a small red apple"
    alone, together = encoder(["red apple"]), encoder(["red apple", long])
    assert_allclose(together[0][0], alone[0][0], atol=1e-5)
    assert_allclose(together[2][0], alone[2][0], atol=1e-5)
    assert open_text_encoder("minilm", max_tokens=5)([long])[1].sum() == 5


def save_tokenizer(folder: Path, **special: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*special.values(), "a", "red", "apple"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def test_t5_pools_by_the_mean(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=16, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, pad_token="<pad>", eos_token="</s>")
    states, mask, pooled = open_text_encoder(str(tmp_path), max_tokens=6)(["a red apple", "red"])
    assert states.shape == (2, 6, 12)
    assert mask.sum(1).tolist() == [3, 1]
    mean = states[0, :3].mean(0)
    assert_allclose(pooled[0], mean / mean.norm(), atol=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_clip_uses_its_pooled_output(tmp_path: Path, whole: bool) -> None:
    from transformers import CLIPConfig, CLIPModel, CLIPTextModel

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"vocab_size": 16, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
    config = CLIPConfig(text_config={**small, **ends}, vision_config={**small, "image_size": 32})
    network = CLIPModel(config) if whole else CLIPTextModel(config.text_config)
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    encoder = open_text_encoder(str(tmp_path), max_tokens=6)
    assert encoder.pools
    tokens = torch.tensor([[2, 3, 4, 5, 1]])
    half = CLIPTextModel.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        expected = half(input_ids=tokens, attention_mask=torch.ones_like(tokens)).pooler_output
    _, _, pooled = encoder.encode({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    assert_allclose(pooled, expected, atol=1e-5)


def test_more_tokens_than_the_encoder_has_positions_are_an_error() -> None:
    assert open_text_encoder("minilm", max_tokens=512).max_tokens == 512
    with pytest.raises(AtollError, match=r"text.max_tokens is 513, but minilm has at most 512 tokens; lower it"):
        open_text_encoder("minilm", max_tokens=513)


def test_a_model_that_is_not_a_text_encoder_is_an_error(tmp_path: Path) -> None:
    from transformers import SiglipTextConfig, SiglipTextModel

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    SiglipTextModel(SiglipTextConfig(vocab_size=16, **small)).save_pretrained(tmp_path)
    with pytest.raises(AtollError, match=r"is not a text encoder .*; give a CLIP, T5 or BERT"):
        open_text_encoder(str(tmp_path), max_tokens=6)


def test_equal_tensors_give_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"b": torch.arange(3), "a": torch.zeros(2, dtype=torch.float16)}, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()

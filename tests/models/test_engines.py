"""Serving engines with a diffusers backend open our folders: their calls, without the engines, which need a GPU.

SGLang 0.5.23 (`runtime/pipelines/diffusers_pipeline.py`) and vLLM-Omni 0.30.0 (`diffusers_adapter`) load a folder with
`DiffusionPipeline.from_pretrained`, and pass what the signature of the pipeline's call accepts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import atoll
from atoll.apps.models.export import export
from models.test_dit_pipeline import write

SHARED = {"prompt": "a red circle", "num_inference_steps": 3, "guidance_scale": 3.0}
ENGINES = """
import inspect, json, sys
sys.modules["atoll"] = None  # importing it is an error
import numpy, torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
torch.set_num_threads(1)
folders, shared, output = json.loads(sys.argv[1])
found = {}

def accepted(pipe, wanted):
    known = inspect.signature(pipe.__call__).parameters
    assert not [each for each in known.values() if each.kind is each.VAR_KEYWORD]
    return {name: value for name, value in wanted.items() if name in known}

for name, (folder, trust, own) in folders.items():
    # SGLang: every component has a folder; bfloat16; tensors are requested
    index = DiffusionPipeline.load_config(folder)
    from pathlib import Path
    parts = [key for key, value in index.items() if key[0] != "_" and isinstance(value, list) and value[0]]
    assert parts and all((Path(folder) / key).is_dir() for key in parts)
    load = {"torch_dtype": torch.bfloat16, "trust_remote_code": trust, "revision": None}
    pipe = DiffusionPipeline.from_pretrained(folder, **load).to("cpu")
    given = {**shared, "height": own.get("side"), "width": own.get("side"), **own}
    generator = torch.Generator(device="cpu").manual_seed(3)
    images = pipe(**accepted(pipe, {**given, "generator": generator}), output_type="pt").images
    assert all(part.dtype == torch.bfloat16 for part in pipe.components.values() if isinstance(part, torch.nn.Module))
    found[f"{name}/sglang"] = images.float().contiguous()
    # vLLM-Omni: a precision, further arguments of the user, inference mode
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=trust)
    pipe.to(torch.device("cpu"))
    if hasattr(pipe, "transformer"):
        pipe.transformer.set_attention_backend("native")
    generator = torch.Generator(device="cpu").manual_seed(3)
    extra = {"generator": generator, "num_images_per_prompt": 1, "output_type": "pil"}
    with torch.inference_mode():
        images = pipe(**accepted(pipe, {**given, **extra})).images
    found[f"{name}/vllm-omni"] = torch.from_numpy(numpy.stack([numpy.asarray(image) for image in images]))
save_file(found, output)
"""


def test_the_calls_of_serving_engines_give_the_images_of_atoll(run: Path, tmp_path: Path) -> None:
    """A standalone folder of experts on text, and a DiTPipeline."""
    dit = write(tmp_path / "dit-run")
    export(run, tmp_path / "standalone", standalone=True)
    export(dit, tmp_path / "dit", "monolith", dit_pipeline=True)
    folders: dict[str, Any] = {
        "standalone": [str(tmp_path / "standalone"), True, {"side": 8}],
        "dit": [str(tmp_path / "dit"), False, {"side": 64, "class_labels": [1]}],
    }
    output = tmp_path / "found.safetensors"
    command = [sys.executable, "-c", ENGINES, json.dumps([folders, SHARED, str(output)])]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    found = load_file(output)

    how: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 3.0}
    noise = torch.randn(1, 12, 8, 8, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    expected = {
        "standalone": atoll.load(run).generate("a red circle", generator=generator, **how),
        "dit": atoll.load(dit, "monolith").generate(label=[1], latents=noise, **how),
    }
    for name, samples in expected.items():
        pixels = np.asarray(samples.images[0], int)
        assert np.abs(found[f"{name}/vllm-omni"][0].numpy() - pixels).max() <= 1
        rounded = found[f"{name}/sglang"][0].permute(1, 2, 0).numpy()
        # bfloat16 has 8 bits: the image is the same one, not the same bits
        assert np.corrcoef(rounded.ravel(), pixels.ravel())[0, 1] > 0.99

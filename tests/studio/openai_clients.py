"""Check a server with the clients of OpenAI and litellm: `python openai_clients.py URL TOKEN`, without Atoll."""

import base64
import json
import os
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would download its table of prices

import litellm
import openai

URL, TOKEN = sys.argv[1:]
PROMPT, STEPS = "a circle", 3
# The client asks for pauses of seconds between retries; a test needs the first answer.
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=TOKEN, max_retries=0)


def own_api(**settings: Any) -> list[str]:
    """Return images of the studio's own API in base64."""
    body = json.dumps({"prompt": PROMPT, "steps": STEPS, **settings}).encode()
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/v1/images", body, headers)) as response:
        return [image["png"] for image in json.load(response)["images"]]


def generate(seed: int, **settings: Any) -> list[Any]:
    extra = {"seed": seed, "num_inference_steps": STEPS}
    return client.images.generate(prompt=PROMPT, extra_body=extra, **settings).data


# Models
models = [model.id for model in client.models.list()]
assert models == ["experts", "expert:0", "expert:1", "expert:2", "monolith", "student"], models
assert client.models.retrieve("expert:1").id == "expert:1"
assert sorted(litellm.get_valid_models(
    check_provider_endpoint=True, custom_llm_provider="openai", api_key=TOKEN, api_base=URL
)) == sorted(models)  # fmt: skip

# Images: the same bytes as the studio's own API
expected = own_api(seed=7, num_images=2)
assert [image.b64_json for image in generate(7, n=2, size="8x8")] == expected
assert [image.b64_json for image in generate(7, model="expert:1")] == own_api(seed=7, expert=1)
for image, file in zip(generate(7, n=2, response_format="url"), expected, strict=True):
    with urllib.request.urlopen(image.url) as response:
        assert base64.b64encode(response.read()).decode() == file
by_litellm = litellm.image_generation(
    prompt=PROMPT, model="openai/experts", n=2, size="8x8", api_base=f"{URL}/v1", api_key=TOKEN,
    extra_body={"seed": 7, "num_inference_steps": STEPS},
)  # fmt: skip
assert [image["b64_json"] for image in by_litellm.data] == expected

# The example of the guide
page = (Path(__file__).parents[2] / "docs/how-to/serve.md").read_text(encoding="utf-8")
(example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
values: dict[str, Any] = {"token": TOKEN}
exec(example.replace("http://127.0.0.1:8400", URL), values)
assert len(values["images"].data) == 4

# 32 clients at once
with ThreadPoolExecutor(32) as pool:
    together = list(pool.map(generate, range(32)))
assert len({image.b64_json for images in together for image in images}) == 32

# Errors
wrong = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong token", max_retries=0)
for kind, call in (
    (openai.AuthenticationError, lambda: wrong.models.list()),
    (openai.NotFoundError, lambda: client.images.generate(prompt=PROMPT, model="dall-e-3")),
    (openai.NotFoundError, lambda: client.models.retrieve("dall-e-3")),
    (openai.BadRequestError, lambda: client.images.generate(prompt=PROMPT, size="9x9")),
    (openai.BadRequestError, lambda: client.images.generate(prompt=PROMPT, n=99)),
    (litellm.BadRequestError, lambda: litellm.image_generation(
        prompt=PROMPT, model="openai/experts", n=99, api_base=f"{URL}/v1", api_key=TOKEN, max_retries=0)),
    (litellm.AuthenticationError, lambda: litellm.image_generation(
        prompt=PROMPT, model="openai/experts", api_base=f"{URL}/v1", api_key="wrong token", max_retries=0)),
):  # fmt: skip
    try:
        call()
    except kind as error:
        print(type(error).__module__, type(error).__name__, getattr(error, "param", None), getattr(error, "code", None))
    else:
        raise AssertionError(f"no {kind.__name__}")
assert client.with_options(max_retries=2).models.list().data[0].object == "model"
print("all checks passed")

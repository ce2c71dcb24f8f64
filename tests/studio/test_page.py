"""The web page in Chromium. Screenshots of every view are saved in build/screenshots."""

import base64
import io
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from studio.browser import (
    DESK,
    FLAGS,
    PHONE,
    PageMonitor,
    Server,
    check_accessibility,
    chromium,
    fits_viewport,
    studio_of,
)
from studio.conftest import held_loading, serving
from train.conftest import merge
from train.workers import TINY, finish, start
from waiting import HOUR, wait_for

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screenshots"
PROMPT = "a circle with the number 3"
STEPS = 8
TOKEN = "palm trees and coconuts"
expect.set_options(timeout=1000 * HOUR)

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="THE PAGE IS NOT TESTED: Chromium is missing; run scripts/install_debian.sh chromium"
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        new_context = browser.new_context

        def patient_context(**options: Any) -> BrowserContext:
            context = new_context(**options)
            context.set_default_timeout(1000 * HOUR)
            return context

        browser.new_context = patient_context
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def finished(served_run: Path) -> Iterator[Server]:
    """A server of a run with three experts, a router, a monolith and a student."""
    with studio_of(served_run) as server:
        yield server


@pytest.fixture
def open_page(browser: Browser, finished: Server) -> Iterator[Any]:
    """Open views of the trained run; assert that no error occurs in them."""
    monitors: list[PageMonitor] = []

    def open_view(view: str = "", size: dict[str, int] = DESK, script: str = "") -> Page:
        context = browser.new_context(viewport=size, reduced_motion="reduce")
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        if script:
            context.add_init_script(script)
        else:
            finished.sign_in(context)
        page = context.new_page()
        monitors.append(PageMonitor(page, finished.url))
        page.goto(f"{finished.url}/{view}")
        return page

    yield open_view
    for monitor in monitors:
        monitor.page.context.close()
        assert not monitor.errors
        assert not monitor.error_responses


def pixels(source: str | None) -> np.ndarray:
    """Return the pixels of an image in a data: URL."""
    assert source is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",", 1)[1]))).convert("RGB"), np.int64)


def equal_images(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Return whether images are equal up to float32 rounding, which depends on the batch size."""
    return len(one) == len(other) and all(abs(a - b).max() <= 1 for a, b in zip(one, other, strict=True))


def api_images(server: Server, **settings: Any) -> list[np.ndarray]:
    """Return the images of the HTTP API, without the page."""
    response = server.request("/v1/images", {"prompt": PROMPT, "steps": STEPS, "guidance_scale": 2.0, **settings})
    return [pixels(f"data:,{image['png']}") for image in response["images"]]


def link(view: str = "generate", **settings: Any) -> str:
    given = {"prompt": PROMPT.replace(" ", "+"), "steps": STEPS, "guidance_scale": 2, **settings}
    return f"#{view}?" + "&".join(f"{name}={value}" for name, value in given.items())


def status(page: Page) -> Locator:
    """Return the status text of the generation."""
    return page.locator(".generation-progress .status")


def test_an_image_is_generated_and_single_experts_can_be_shown(open_page: Any, finished: Server) -> None:
    page: Page = open_page()
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_label("Steps").fill(str(STEPS))
    page.get_by_label("Guidance scale").fill("2")
    page.get_by_label("Routing").select_option("full")
    page.evaluate(
        """() => {
          window.texts = new Set();
          const record = () => window.texts.add(document.querySelector(".generation-progress .status")?.textContent);
          new MutationObserver(record).observe(document.querySelector(".results"), {subtree: true, childList: true});
        }"""
    )
    page.get_by_label("Prompt").press("Enter")
    expect(status(page)).to_have_text(re.compile("Done in"))
    shown = page.locator(".image-view img.generated")
    image = pixels(shown.get_attribute("src"))
    assert equal_images([image], api_images(finished, routing="full"))
    texts = page.evaluate("[...window.texts]")
    assert {f"Step {step} of {STEPS}" for step in (1, STEPS // 2, STEPS)} <= set(texts)

    slider = page.get_by_label("Displayed step")
    slider.press("Home")
    expect(page.locator(".step-text")).to_have_text("Step 0: noise")
    for _ in range(STEPS - 1):  # to the first preview: a slow reader gets only the newest ones
        slider.press("ArrowRight")
        if not page.locator(".image-view .empty").count():
            break
    assert int(slider.input_value()) < STEPS
    assert not page.locator(".image-view .empty").count()
    assert not equal_images([pixels(shown.get_attribute("src"))], [image])
    slider.press("End")
    page.get_by_text("Show as a table").click()
    lines = page.locator(".weights tbody tr")  # the table is built when it is opened
    expect(lines).to_have_count(STEPS)
    rows = [line.locator("td").all_text_contents() for line in lines.all()]
    totals = [sum(int(re.sub(r"\D", "", cell) or 0) for cell in row[1:]) for row in rows]
    assert all(98 <= total <= 102 for total in totals)

    posts: list[str] = []
    page.on("request", lambda request: posts.append(request.post_data or "") if request.method == "POST" else None)
    page.get_by_role("button", name="Expert 1").hover()
    expect(page.locator(".tag")).to_have_text("Expert 1 only")
    assert equal_images([pixels(shown.get_attribute("src"))], api_images(finished, expert=1))
    page.get_by_label("Prompt").hover()
    expect(page.locator(".tag")).to_be_hidden()
    assert equal_images([pixels(shown.get_attribute("src"))], [image])
    page.get_by_role("button", name="Expert 1").focus()
    for pressed in ("true", "false"):
        expect(page.locator(".tag")).to_have_text("Expert 1 only")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Expert 1")).to_have_attribute("aria-pressed", pressed)
    expect(page.locator(".tag")).to_be_hidden()
    assert len(posts) == 1


def test_a_link_generates_images_and_the_gallery_stores_them(open_page: Any, finished: Server) -> None:
    page: Page = open_page(link(routing="top-2", seed=5, num_images=2))
    expect(status(page)).to_have_text(re.compile("Done in"))
    expect(page.get_by_label("Seed")).to_have_value("5")
    shown = [pixels(image.get_attribute("src")) for image in page.locator(".image-view img.generated").all()]
    assert equal_images(shown, api_images(finished, routing="top-2", seed=5, num_images=2))
    page.evaluate(
        """() => {
          const results = document.querySelector(".results");
          const check = (resolve) => () => results.textContent.includes("Copied") && resolve();
          const watch = (resolve) => new MutationObserver(check(resolve));
          const changes = {subtree: true, childList: true, characterData: true};
          window.copied = new Promise((resolve) => watch(resolve).observe(results, changes));
        }"""
    )
    page.get_by_role("button", name="Copy link").first.click()
    page.evaluate("window.copied")  # the button shows this only for a moment
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url

    page.get_by_role("link", name="Gallery").click()
    page.reload()
    tiles = page.locator(".tiles img")
    expect(tiles).to_have_count(2)
    assert equal_images([pixels(tile.get_attribute("src")) for tile in tiles.all()], shown)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").first.click()
    with Image.open(download.value.path()) as file:
        assert equal_images([np.asarray(file.convert("RGB"), np.int64)], shown[:1])
        assert '"seed": 5' in file.info["atoll"]
    tiles.first.click()
    expect(status(page)).to_have_text(re.compile("Done in"))
    assert equal_images([pixels(page.locator(".image-view img.generated").first.get_attribute("src"))], shown[:1])


def test_compare_opens_with_a_first_comparison(open_page: Any, finished: Server) -> None:
    page: Page = open_page("#compare")
    example = finished.request("/v1/run")["examples"][0]
    expect(page.locator(".results h2")).to_have_text(re.compile(example))
    expect(page.locator(".row figcaption", has_text=re.compile("^seed 0$"))).to_have_count(4)
    expect(page.get_by_label("Prompt")).to_have_value(example)
    page.get_by_role("link", name="Gallery").click()
    page.get_by_role("link", name="Compare").click()  # the results stay, and nothing is generated again
    expect(page.locator(".row figcaption", has_text=re.compile("^seed 0$"))).to_have_count(4)
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()


def test_routings_models_and_seeds_are_compared(open_page: Any, finished: Server) -> None:
    page: Page = open_page("#compare")
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_label("Steps", exact=True).fill(str(STEPS))
    page.get_by_label("Guidance scale").fill("2")
    page.get_by_label("First seed", exact=True).fill("3")
    page.get_by_label("Seeds", exact=True).select_option("2")
    for name in ("top-1", "top-2", "full", "monolith"):
        page.get_by_role("checkbox", name=name, exact=True).set_checked(name in ("top-1", "monolith"))
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".row figcaption", has_text=re.compile("^seed [34]$"))).to_have_count(4)
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    shown = [pixels(image.get_attribute("src")) for image in page.locator(".row img").all()]
    variants = ({"routing": "top-1"}, {"model": "monolith"})
    assert equal_images(
        shown, [api_images(finished, **variant, seed=seed)[0] for variant in variants for seed in (3, 4)]
    )
    assert page.locator(".cost").first.text_content() == "1.0 experts per step"


def test_invalid_form_values_can_be_corrected(open_page: Any) -> None:
    page: Page = open_page("#compare")
    expect(page.get_by_role("checkbox", name="top-1", exact=True)).to_be_checked()  # the form is shown
    for checkbox in page.get_by_role("checkbox").all():
        checkbox.set_checked(False)
    expect(page.locator(".row")).to_have_count(4)  # the first comparison
    for checked, rows in ((False, 4), (True, 1)):
        page.get_by_role("checkbox", name="top-1", exact=True).set_checked(checked)
        page.get_by_role("button", name="Compare").click()
        expect(page.locator(".row")).to_have_count(rows)

    page = open_page("", PHONE)
    settings = page.locator("details", has_text="Settings").first
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Steps").fill("")
    page.get_by_text("Settings", exact=True).click()
    expect(settings).not_to_have_attribute("open", "")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(settings).to_have_attribute("open", "")  # so that the invalid field is visible
    page.get_by_label("Steps").fill("2")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(status(page)).to_have_text(re.compile("Done in"))


def test_an_expert_trained_meanwhile_appears_with_its_weights(
    browser: Browser, served_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(served_run, run)
    (run / "experts/001").rename(tmp_path / "later")
    with studio_of(run) as server:
        page = browser.new_context(viewport=DESK, reduced_motion="reduce").new_page()
        server.sign_in(page.context)
        monitor = PageMonitor(page, server.url)
        page.goto(f"{server.url}/{link('compare')}")
        page.goto(f"{server.url}/{link(routing='full')}")
        expect(page.locator(".legend .name")).to_have_text([re.compile("Expert 0"), re.compile("Expert 2")])
        expect(status(page)).to_have_text(re.compile("Done in"))
        (tmp_path / "later").rename(run / "experts/001")
        wait_for(lambda: len(server.request("/v1/run")["experts"]) == 3)
        same = {"prompt": PROMPT, "steps": STEPS, "guidance_scale": 2, "routing": "full"}
        weights = np.array(server.request("/v1/images", same)["weights"])
        page.get_by_role("button", name="Generate", exact=True).click()
        expect(status(page)).to_have_text(re.compile("Done in"))
        expect(page.locator(".legend .name")).to_have_text([re.compile(f"Expert {k}") for k in range(3)])
        shares = [int(re.sub(r"\D", "", text)) for text in page.locator(".legend b").all_text_contents()]
        assert np.allclose(shares, 100 * weights.mean((0, 1)), atol=1)
        assert not monitor.errors
        page.context.close()


@pytest.mark.usefixtures("held")
def test_a_generation_is_cancelled(browser: Browser, served_run: Path) -> None:
    with serving(served_run) as (url, studio):
        page = browser.new_context(viewport=DESK, reduced_motion="reduce").new_page()
        page.goto(f"{url}/{link(steps=250)}")
        expect(status(page)).to_have_text(re.compile("Step "))
        page.get_by_role("button", name="Cancel").click()
        expect(status(page)).to_have_text("Cancelled.")
        wait_for(lambda: studio.engine.idle)  # free for others
        page.context.close()


def test_the_page_works_with_blocked_storage(open_page: Any, finished: Server) -> None:
    script = "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, "
    script += "{get() { throw new DOMException('no', 'SecurityError') }})"
    page: Page = open_page(f"#token={finished.token}", script=script)
    expect(page.get_by_role("button", name="Generate", exact=True)).to_be_visible()
    page.goto(f"{finished.url}/{link()}")
    expect(status(page)).to_have_text(re.compile("Done in"))
    page.get_by_role("link", name="Gallery").click()
    expect(page.get_by_text("This browser blocks storage")).to_be_visible()
    expect(page.locator(".tiles img")).to_have_count(1)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_every_view_is_accessible(open_page: Any, finished: Server, size: dict[str, int]) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    name = "phone" if size is PHONE else "desk"
    page: Page = open_page("", size)
    expect(page.get_by_role("button", name="Generate", exact=True)).to_be_visible()
    for view, ready in (
        (link(routing="full"), "Done in"),
        (link("compare", variants="top-1+full+monolith", seeds=2), "1.0 experts per step"),
        ("#gallery", "Clear the gallery"),
        ("#clusters", "velocity, linear"),
        ("#islands", "All 6 networks are trained"),
    ):
        page.evaluate("hash => location.hash = hash", view)
        expect(page.get_by_text(ready).first).to_be_visible()
        page.wait_for_load_state("networkidle")
        check_accessibility(page, SHOTS, f"{view[1:].split('?')[0]}-{name}")
        assert fits_viewport(page), view
    clusters = finished.request("/v1/clusters")["clusters"]
    page.get_by_role("link", name="Clusters").click()
    expect(page.locator(".cluster .size")).to_have_count(len(clusters))
    sizes = [size.split(" images")[0] for size in page.locator(".cluster .size").all_text_contents()]
    assert sizes == [str(cluster["images"]) for cluster in clusters]
    expect(page.locator("img.sheet")).to_have_count(len(clusters))
    page.wait_for_function("[...document.querySelectorAll('img.sheet')].every((image) => image.naturalWidth > 0)")


def test_the_printed_address_signs_in_and_the_token_leaves_the_address_bar(browser: Browser, finished: Server) -> None:
    """A new tab, a tab that shows the dialog, and one with a wrong token; nothing but the fragment has the token."""
    context = browser.new_context(viewport=DESK, reduced_motion="reduce")
    page = context.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    address = f"{finished.url}/#token={finished.token}"

    def check_signed_in() -> None:
        expect(page.get_by_role("button", name="Generate", exact=True)).to_be_visible()
        assert page.url == f"{finished.url}/"
        assert page.evaluate("sessionStorage.getItem('atoll.token')") == finished.token
        expect(page.get_by_role("dialog")).to_be_hidden()

    page.goto(address)
    check_signed_in()
    page.reload()
    check_signed_in()
    assert not any(finished.token in url for url in requested)
    assert page.evaluate("history.length") == 2  # about:blank and the page: no entry has the token
    page = context.new_page()  # sessionStorage belongs to the tab
    page.goto(finished.url)
    expect(page.get_by_role("dialog")).to_be_visible()
    page.goto(address)
    check_signed_in()
    page = context.new_page()
    page.goto(f"{finished.url}/#token={'x' * 32}")
    expect(page.get_by_text("This token is wrong.")).to_be_visible()
    page.goto(address)
    check_signed_in()
    context.close()


def test_pages_of_other_sites_cannot_use_the_studio(browser: Browser, finished: Server, served_run: Path) -> None:
    """Another port of this machine is another origin: it can neither read, embed nor generate images."""
    with serving(served_run) as (other, _):
        page = browser.new_context(viewport=DESK).new_page()
        page.goto(f"{other}/health")
        script = """async (target) => {
          const headers = {authorization: "Bearer " + target.token};
          const tries = [
            fetch(target.url + "/v1/run", {headers}),
            fetch(target.url + "/v1/run", {headers, mode: "no-cors"}).then((found) => found.text()).then((text) => {
              if (!text) throw new Error("opaque");
            }),
            fetch(target.url + "/v1/images", {method: "POST", body: "{}", headers}),
            new Promise((resolve, reject) => {
              const image = Object.assign(new Image(), {onload: resolve, onerror: reject});
              image.src = target.url + "/page/icon.svg";
            }),
          ];
          return (await Promise.allSettled(tries)).map(({status}) => status);
        }"""
        tries = page.evaluate(script, {"url": finished.url, "token": finished.token})
        assert tries == ["rejected"] * 4
        page.evaluate("(url) => { location.href = url }", f"{finished.url}/")  # but a link may lead to the page
        expect(page.get_by_role("dialog")).to_be_visible()
        page.context.close()


def untrained_run(prepared: Path, run: Path) -> Path:
    """Return a prepared run without trained networks whose jobs take long."""
    shutil.copytree(prepared / "data", run / "data")
    training = {
        "total_images": 1_000_000, "sample_every": 160, "sample_count": 4, "log_every": 32, "lr_schedule": "constant",
    }  # fmt: skip
    values = merge(merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY), {"train": training})
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return run


def test_training_is_shown_and_trained_experts_become_available(
    browser: Browser, prepared: Path, tmp_path: Path
) -> None:
    """The page requests a token, shows an untrained run, follows its training, and then generates images."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    run = untrained_run(prepared, tmp_path / "untrained")
    with studio_of(run, "--queue", "0", "--batch-size", "1", token=TOKEN, ready=False) as server:
        page = browser.new_context(viewport=DESK, reduced_motion="reduce").new_page()
        monitor = PageMonitor(page, server.url)
        page.goto(server.url)
        expect(page.get_by_role("dialog")).to_be_visible()
        check_accessibility(page, SHOTS, "token-desk")
        for token in ("p\u201clm", "coconut", f"{server.url}/#token={TOKEN}"):  # the whole address may be pasted
            page.get_by_label("Token", exact=True).fill(token)
            page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("No expert is trained yet")).to_be_visible()
        expect(page.get_by_text("experts/000, experts/001, experts/002")).to_be_visible()
        check_accessibility(page, SHOTS, "untrained-desk")
        page.get_by_role("link", name="Islands").first.click()
        check_training_view(page, run)
        page.get_by_role("link", name="Generate").first.click()
        check_busy_server(page, server)
        assert {response.split()[0] for response in monitor.error_responses} == {"401", "429"}
        assert not monitor.errors
        page.context.close()


def test_a_trained_run_shows_what_is_being_loaded(
    browser: Browser, served_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    with held_loading(monkeypatch) as released, serving(served_run, ready=False) as (url, _):
        page = browser.new_context(viewport=DESK, reduced_motion="reduce").new_page()
        page.goto(url)
        expect(page.get_by_text("Loading model 1 of 3: experts (4 networks).")).to_be_visible()
        expect(page.get_by_text("No expert is trained yet")).to_have_count(0)
        check_accessibility(page, SHOTS, "loading-desk")
        page.goto(f"{url}/#compare")
        expect(page.get_by_text("Loading model 1 of 3: experts (4 networks).")).to_be_visible()
        released.set()
        expect(page.locator(".row").first).to_be_visible()  # the first comparison
        page.get_by_role("link", name="Generate").first.click()
        expect(page.get_by_role("button", name="Generate", exact=True)).to_be_visible()
        page.context.close()


def check_training_view(page: Page, run: Path) -> None:
    """Follow a long job, which is then terminated, and a short one until its end."""
    card, short = page.get_by_role("article", name="experts/000"), page.get_by_role("article", name="experts/001")
    expect(card.locator(".state")).to_have_text("waiting for an island")
    job = start(run, "--expert", "0")
    try:
        expect(card.locator(".state")).to_have_text("training")
        host = card.locator(".info span")
        expect(host).to_have_text(platform.node())
        assert (host.get_attribute("title") or "").startswith(f"{platform.node()}:")
        expect(card.locator("img.sheet")).to_be_visible()
        expect(card.locator(".loss")).to_be_visible()
        before = card.locator("progress").evaluate("bar => bar.value")
        expect(card.locator("progress")).not_to_have_js_property("value", before)
        assert card.locator("progress").evaluate("bar => bar.value") > before
        check_accessibility(page, SHOTS, "islands-training-desk")
    finally:
        job.terminate()
    assert finish(run, "--expert", "1", "--train.total_images", "32", "--train.sample_every", "0") == 0
    expect(short.locator(".state")).to_have_text("done")
    expect(page.locator(".intro")).to_have_text(re.compile("^1 of 4 networks trained"))
    job.join(HOUR)
    assert job.exitcode == 75  # interrupted with a checkpoint


def check_busy_server(page: Page, server: Server) -> None:
    """The page waits while another request fills the batch, and generates afterwards."""
    # Loading the text encoder takes some seconds, on a busy machine more.
    expect(page.get_by_role("button", name="Generate", exact=True)).to_be_visible()
    with server.stream({"steps": 250, "num_images": 8}):  # leaving the block cancels it
        page.get_by_role("button", name="Generate", exact=True).click()
        expect(status(page)).to_have_text(re.compile("The server is busy"))
    expect(status(page)).to_have_text(re.compile("Done in"))


def test_the_size_of_the_images_can_be_chosen(browser: Browser, sized_run: Path, tmp_path: Path) -> None:
    """In Generate and, with the link from there, in Compare; the frame has the ratio of the images."""
    run = tmp_path / "sized"
    shutil.copytree(sized_run, run)
    with studio_of(run) as server, browser.new_context(viewport=DESK, reduced_motion="reduce") as context:
        server.sign_in(context)
        page = context.new_page()
        monitor = PageMonitor(page, server.url)
        page.goto(server.url)
        sizes = page.get_by_label("Size")
        expect(sizes).to_be_visible()
        assert sizes.locator("option").all_text_contents() == ["16 × 16", "20 × 12", "12 × 20", "24 × 8", "8 × 24"]
        sizes.select_option("20x12")
        page.get_by_label("Steps").fill("4")
        page.get_by_role("button", name="Generate", exact=True).click()
        expect(status(page)).to_contain_text("Done")
        assert "width=20" in page.url
        assert "height=12" in page.url
        image = page.locator("img.generated")
        assert image.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [20, 12]
        box = page.locator(".image-view .frame").bounding_box()
        assert box is not None
        assert box["width"] / box["height"] == pytest.approx(20 / 12, rel=0.02)
        assert "20\u00a0×\u00a012" in page.locator(".settings-text").inner_text()
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / "generate-size.png")
        page.get_by_role("link", name="Compare models").click()
        expect(page.get_by_label("Size")).to_have_value("20x12")
        page.get_by_role("button", name="Compare", exact=True).click()
        expect(page.locator(".row img").first).to_have_js_property("naturalWidth", 20)
        expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
        check_accessibility(page, SHOTS, "compare-size")
        page.goto(f"{server.url}/#generate?width=12&height=20&steps=2&label=dots")
        page.reload()
        expect(page.locator("img.generated")).to_have_js_property("naturalHeight", 20)
        assert not monitor.errors
        assert not monitor.error_responses

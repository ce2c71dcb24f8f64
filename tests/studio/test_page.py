"""The page as people use it. Screenshots of every view are kept in build/screenshots."""

import base64
import io
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from studio.browser import DESK, FLAGS, PHONE, Server, Watched, accessible, chromium, fits, studio_of
from train.conftest import merge
from train.workers import TINY, finish, start, wait_for

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screenshots"
PROMPT = "a circle with the number 3"
STEPS = 8
expect.set_options(timeout=20_000)

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="THE PAGE IS NOT TESTED: there is no Chromium; run scripts/install_debian.sh chromium"
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def finished(served_run: Path) -> Iterator[Server]:
    """A server on a run with three experts, a router, a monolith and a student."""
    with studio_of(served_run) as server:
        yield server


@pytest.fixture
def open_page(browser: Browser, finished: Server) -> Iterator[Any]:
    """Open a view of the finished run: nothing may go wrong in it."""
    watched: list[Watched] = []

    def open_view(view: str = "", size: dict[str, int] = DESK, script: str = "") -> Page:
        context = browser.new_context(viewport=size, reduced_motion="reduce")
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        if script:
            context.add_init_script(script)
        page = context.new_page()
        watched.append(Watched(page, finished.url))
        page.goto(f"{finished.url}/{view}")
        return page

    yield open_view
    for each in watched:
        each.page.context.close()
        assert not each.complaints
        assert not each.refusals


def pixels(source: str | None) -> np.ndarray:
    """The pixels of a picture in a data: URL."""
    assert source is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",", 1)[1]))).convert("RGB"), np.int64)


def alike(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """The same pictures up to the rounding of float32 in batches of other sizes."""
    return len(one) == len(other) and all(abs(a - b).max() <= 1 for a, b in zip(one, other, strict=True))


def asked(server: Server, **settings: Any) -> list[np.ndarray]:
    """The same pictures from the API, without the page."""
    answer = server.ask("/v1/images", {"prompt": PROMPT, "steps": STEPS, "guidance_scale": 2.0, **settings})
    return [pixels(f"data:,{image['png']}") for image in answer["images"]]


def link(view: str = "paint", **settings: Any) -> str:
    given = {"prompt": PROMPT.replace(" ", "+"), "steps": STEPS, "guidance_scale": 2, **settings}
    return f"#{view}?" + "&".join(f"{name}={value}" for name, value in given.items())


def said(page: Page) -> Locator:
    """How far a painting is, in words."""
    return page.locator(".going .said")


def test_a_picture_emerges_and_every_expert_can_be_asked(open_page: Any, finished: Server) -> None:
    page: Page = open_page()
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_label("Steps").fill(str(STEPS))
    page.get_by_label("Guidance").fill("2")
    page.get_by_label("Routing").select_option("full")
    page.evaluate(
        """() => {
          window.heard = new Set();
          const listen = () => window.heard.add(document.querySelector(".going .said")?.textContent);
          new MutationObserver(listen).observe(document.querySelector(".stage"), {subtree: true, childList: true});
        }"""
    )
    page.get_by_label("Prompt").press("Enter")
    expect(said(page)).to_have_text(re.compile("Done in"))
    made = page.locator(".easel img.made")
    picture = pixels(made.get_attribute("src"))
    assert alike([picture], asked(finished, routing="full"))
    heard = page.evaluate("[...window.heard]")
    assert {f"Step {step} of {STEPS}" for step in (1, STEPS // 2, STEPS)} <= set(heard)

    page.get_by_label("Step that is shown").press("Home")
    expect(page.locator(".reading")).to_have_text("nothing but noise")
    slider = page.get_by_label("Step that is shown")
    for _ in range(STEPS - 1):  # to the first preview: a slow reader gets the newest only
        slider.press("ArrowRight")
        if not page.locator(".easel .empty").count():
            break
    assert int(slider.input_value()) < STEPS
    assert not page.locator(".easel .empty").count()
    assert not alike([pixels(made.get_attribute("src"))], [picture])
    page.get_by_label("Step that is shown").press("End")
    page.get_by_text("Weights as a table").click()
    lines = page.locator(".weights tbody tr")  # they come once the table is open
    expect(lines).to_have_count(STEPS)
    rows = [line.locator("td").all_text_contents() for line in lines.all()]
    shares = [sum(int(re.sub(r"\D", "", cell) or 0) for cell in row[1:]) for row in rows]
    assert all(98 <= share <= 102 for share in shares)

    asks: list[str] = []
    page.on("request", lambda request: asks.append(request.post_data or "") if request.method == "POST" else None)
    page.get_by_role("button", name="Expert 1").hover()
    expect(page.locator(".tag")).to_have_text("Expert 1 alone")
    assert alike([pixels(made.get_attribute("src"))], asked(finished, expert=1))
    page.get_by_label("Prompt").hover()
    expect(page.locator(".tag")).to_be_hidden()
    assert alike([pixels(made.get_attribute("src"))], [picture])
    page.get_by_role("button", name="Expert 1").focus()
    for pressed in ("true", "false"):
        expect(page.locator(".tag")).to_have_text("Expert 1 alone")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Expert 1")).to_have_attribute("aria-pressed", pressed)
    expect(page.locator(".tag")).to_be_hidden()
    assert len(asks) == 1


def test_a_link_paints_and_the_gallery_keeps_it(open_page: Any, finished: Server) -> None:
    page: Page = open_page(link(routing="top-2", seed=5, n=2))
    expect(said(page)).to_have_text(re.compile("Done in"))
    expect(page.get_by_label("Seed")).to_have_value("5")
    shown = [pixels(picture.get_attribute("src")) for picture in page.locator(".easel img.made").all()]
    assert alike(shown, asked(finished, routing="top-2", seed=5, n=2))
    page.evaluate(
        """() => {
          const seen = (resolve) => () => document.querySelector(".stage").textContent.includes("Copied") && resolve();
          const watch = (resolve) => new MutationObserver(seen(resolve));
          const what = {subtree: true, childList: true, characterData: true};
          window.copied = new Promise((resolve) => watch(resolve).observe(document.querySelector(".stage"), what));
        }"""
    )
    page.get_by_role("button", name="Copy link").first.click()
    page.evaluate("window.copied")  # it says so for a moment only
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url

    page.get_by_role("link", name="Gallery").click()
    page.reload()
    tiles = page.locator(".tiles img")
    expect(tiles).to_have_count(2)
    assert alike([pixels(tile.get_attribute("src")) for tile in tiles.all()], shown)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").first.click()
    with Image.open(download.value.path()) as kept:
        assert alike([np.asarray(kept.convert("RGB"), np.int64)], shown[:1])
        assert '"seed": 5' in kept.info["atoll"]
    tiles.first.click()
    expect(said(page)).to_have_text(re.compile("Done in"))
    assert alike([pixels(page.locator(".easel img.made").first.get_attribute("src"))], shown[:1])


def test_painters_and_seeds_are_compared(open_page: Any, finished: Server) -> None:
    page: Page = open_page("#compare")
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_label("Steps").fill(str(STEPS))
    page.get_by_label("Guidance").fill("2")
    page.get_by_label("First seed").fill("3")
    page.get_by_label("Seeds", exact=True).select_option("2")
    for name in ("top-1", "top-2", "full", "monolith"):
        page.get_by_label(name, exact=True).set_checked(name in ("top-1", "monolith"))
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".row figcaption", has_text=re.compile("^seed [34]$"))).to_have_count(4)
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    shown = [pixels(picture.get_attribute("src")) for picture in page.locator(".row img").all()]
    painters = ({"routing": "top-1"}, {"model": "monolith"})
    assert alike(shown, [asked(finished, **who, seed=seed)[0] for who in painters for seed in (3, 4)])
    assert page.locator(".cost").first.text_content() == "1.0 experts a step"


def test_what_is_wrong_in_a_form_can_be_put_right(open_page: Any) -> None:
    page: Page = open_page("#compare")
    expect(page.get_by_label("top-1", exact=True)).to_be_checked()  # the form is there
    for tick in page.get_by_role("checkbox").all():
        tick.set_checked(False)
    for wanted in (False, True):
        page.get_by_label("top-1", exact=True).set_checked(wanted)
        page.get_by_role("button", name="Compare").click()
        expect(page.locator(".row")).to_have_count(int(wanted))

    page = open_page("", PHONE)
    settings = page.locator("details", has_text="Settings").first
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Steps").fill("")
    page.get_by_text("Settings", exact=True).click()
    expect(settings).not_to_have_attribute("open", "")
    page.get_by_role("button", name="Paint", exact=True).click()
    expect(settings).to_have_attribute("open", "")  # to what is wrong
    page.get_by_label("Steps").fill("2")
    page.get_by_role("button", name="Paint", exact=True).click()
    expect(said(page)).to_have_text(re.compile("Done in"))


def test_an_expert_that_is_finished_meanwhile_gets_its_own_weights(
    browser: Browser, served_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(served_run, run)
    (run / "experts/001").rename(tmp_path / "later")
    with studio_of(run) as server:
        page = browser.new_context(viewport=DESK, reduced_motion="reduce").new_page()
        watched = Watched(page, server.url)
        page.goto(f"{server.url}/{link('compare')}")
        page.goto(f"{server.url}/{link(routing='full')}")
        expect(page.locator(".legend .name")).to_have_text([re.compile("Expert 0"), re.compile("Expert 2")])
        expect(said(page)).to_have_text(re.compile("Done in"))
        (tmp_path / "later").rename(run / "experts/001")
        wait_for(lambda: len(server.ask("/v1/run")["experts"]) == 3)
        same = {"prompt": PROMPT, "steps": STEPS, "guidance_scale": 2, "routing": "full"}
        weights = np.array(server.ask("/v1/images", same)["weights"])
        page.get_by_role("button", name="Paint", exact=True).click()
        expect(said(page)).to_have_text(re.compile("Done in"))
        expect(page.locator(".legend .name")).to_have_text([re.compile(f"Expert {k}") for k in range(3)])
        shares = [int(re.sub(r"\D", "", text)) for text in page.locator(".legend b").all_text_contents()]
        assert np.allclose(shares, 100 * weights.mean((0, 1)), atol=1)
        assert not watched.complaints
        page.context.close()


def test_a_painting_is_cancelled(open_page: Any, finished: Server) -> None:
    page: Page = open_page(link(steps=250, n=16))
    expect(said(page)).to_have_text(re.compile("Step "))
    page.get_by_role("button", name="Cancel").click()
    expect(said(page)).to_have_text("Cancelled.")
    done = finished.ask("/v1/images", {"prompt": PROMPT, "steps": 2})  # the engine is free for others
    assert len(done["images"]) == 1


def test_storage_may_be_refused(open_page: Any) -> None:
    refused = "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, "
    page: Page = open_page(link(), script=refused + "{get() { throw new DOMException('no', 'SecurityError') }})")
    expect(said(page)).to_have_text(re.compile("Done in"))
    page.get_by_role("link", name="Gallery").click()
    expect(page.get_by_text("This browser keeps nothing")).to_be_visible()
    expect(page.locator(".tiles img")).to_have_count(1)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_every_view_is_accessible(open_page: Any, finished: Server, size: dict[str, int]) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    name = "phone" if size is PHONE else "desk"
    page: Page = open_page("", size)
    expect(page.get_by_role("button", name="Paint", exact=True)).to_be_visible()
    for view, ready in (
        (link(routing="full"), "Done in"),
        (link("compare", painters="top-1+full+monolith", seeds=2), "1.0 experts a step"),
        ("#gallery", "Empty the gallery"),
        ("#clusters", "velocity, linear"),
        ("#islands", "All 6 networks are trained"),
    ):
        page.evaluate("hash => location.hash = hash", view)
        expect(page.get_by_text(ready).first).to_be_visible()
        page.wait_for_load_state("networkidle")
        accessible(page, SHOTS, f"{view[1:].split('?')[0]}-{name}")
        assert fits(page), view
    clusters = finished.ask("/v1/clusters")["clusters"]
    page.get_by_role("link", name="Clusters").click()
    expect(page.locator(".cluster .size")).to_have_count(len(clusters))
    sizes = [size.split(" pictures")[0] for size in page.locator(".cluster .size").all_text_contents()]
    assert sizes == [str(cluster["pictures"]) for cluster in clusters]
    expect(page.locator("img.sheet")).to_have_count(len(clusters))
    page.wait_for_function("[...document.querySelectorAll('img.sheet')].every((image) => image.naturalWidth > 0)")


def young_run(prepared: Path, run: Path) -> Path:
    """A prepared run that nothing was trained in; its jobs take long."""
    shutil.copytree(prepared / "data", run / "data")
    training = {"samples": 1_000_000, "grid_every": 160, "grid_size": 4, "log_every": 32, "decay": "constant"}
    values = merge(merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY), {"train": training})
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return run


def test_the_islands_while_they_train(browser: Browser, prepared: Path, tmp_path: Path) -> None:
    """A token is asked for; nothing is finished; training is watched; what it finishes paints, in its turn."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    run = young_run(prepared, tmp_path / "young")
    with studio_of(run, "--queue", "0", "--batch-size", "1", token="palm", ready=False) as server:
        page = browser.new_context(viewport=DESK, reduced_motion="reduce").new_page()
        watched = Watched(page, server.url)
        page.goto(server.url)
        expect(page.get_by_role("dialog")).to_be_visible()
        accessible(page, SHOTS, "token-desk")
        for token in ("p\u201clm", "coconut", "palm"):
            page.get_by_label("Token", exact=True).fill(token)
            page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("Nothing can paint yet")).to_be_visible()
        expect(page.get_by_text("experts/000, experts/001, experts/002")).to_be_visible()
        accessible(page, SHOTS, "nothing-yet-desk")
        page.get_by_role("link", name="Islands").first.click()
        watch_it_train(page, run)
        page.get_by_role("link", name="Paint").first.click()
        busy_then_paints(page, server)
        assert {refusal.split()[0] for refusal in watched.refusals} == {"401", "429"}
        assert not watched.complaints
        page.context.close()


def watch_it_train(page: Page, run: Path) -> None:
    """One job is seen at work and told to stop; another, a short one, is seen to end."""
    card, short = page.get_by_role("article", name="experts/000"), page.get_by_role("article", name="experts/001")
    expect(card.locator(".state")).to_have_text("waits for an island")
    job = start(run, "--expert", "0")
    try:
        expect(card.locator(".state")).to_have_text("training", timeout=60_000)
        expect(card.locator("img.sheet")).to_be_visible(timeout=60_000)
        expect(card.locator(".loss")).to_be_visible()
        before = card.locator("progress").evaluate("bar => bar.value")
        expect(card.locator("progress")).not_to_have_js_property("value", before)
        assert card.locator("progress").evaluate("bar => bar.value") > before
        accessible(page, SHOTS, "islands-training-desk")
    finally:
        job.terminate()
    assert finish(run, "--expert", "1", "--train.total_images", "32", "--train.sample_every", "0") == 0
    expect(short.locator(".state")).to_have_text("done")
    expect(page.locator(".intro")).to_have_text(re.compile("^1 of 4 networks trained"))
    job.join(60)
    assert job.exitcode == 75  # saved, to be continued


def busy_then_paints(page: Page, server: Server) -> None:
    """While somebody else has the only place, the page waits; when it is free, it paints."""
    expect(page.get_by_role("button", name="Paint", exact=True)).to_be_visible()
    with server.stream({"steps": 250, "n": 8}):  # leaving the block cancels it
        page.get_by_role("button", name="Paint", exact=True).click()
        expect(said(page)).to_have_text(re.compile("The studio is busy"))
    expect(said(page)).to_have_text(re.compile("Done in"), timeout=120_000)

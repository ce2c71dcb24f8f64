"""Take the pictures of the studio and the report from a finished demo; Chromium must be installed.

python docs/figures/screens.py [RUN] [PROMPT]
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent
VIEW = {"width": 1280, "height": 860}
TIMEOUT = 600_000
"""Milliseconds that a step may take: twelve images on a busy machine."""


def main(run: Path, prompt: str) -> None:
    """Write studio-generate.png, studio-compare.png and report.png beside this file."""
    command = [sys.executable, "-m", "atoll", "serve", str(run), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())
            take(f"{address['url']}/#token={address['token']}", (run / "report.html").resolve().as_uri(), prompt)
        finally:
            server.terminate()


def take(studio: str, report: str, prompt: str) -> None:
    """Generate images in the studio, and take the pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport=VIEW, reduced_motion="reduce").new_page()
        page.set_default_timeout(TIMEOUT)
        page.goto(studio)
        page.get_by_label("Prompt").fill(prompt)
        page.get_by_label("Prompt").press("Enter")
        page.get_by_role("button", name="Run each expert").click()
        for thumbnail in page.locator(".legend img").all():
            thumbnail.wait_for()
        page.screenshot(path=FOLDER / "studio-generate.png")
        page.get_by_role("link", name="Compare models").click()
        page.get_by_role("button", name="Compare", exact=True).click()
        page.get_by_role("button", name="Cancel").wait_for(state="visible")
        page.get_by_role("button", name="Cancel").wait_for(state="hidden")
        page.locator(".results").scroll_into_view_if_needed()
        page.screenshot(path=FOLDER / "studio-compare.png")
        page.goto(report)
        page.screenshot(path=FOLDER / "report.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"), sys.argv[2] if len(sys.argv) > 2 else "panda")

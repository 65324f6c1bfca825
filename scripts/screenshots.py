"""The pictures of the inspector in docs/images, made anew from the page as it is.

python scripts/screenshots.py [--chromium PATH]        needs `make web`, playwright, Chromium and pngquant
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
PROMPT = "The old lighthouse keeper"
PARAMS = {"max_tokens": 60, "temperature": 0.7, "top_p": 0.9, "seed": 3}
MOST_BYTES = 300_000  # of all pictures


def start_server() -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "unspool", "serve", "--port", "0", "--log", "off", "--drain", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while (found := re.search(r"(http://[^/\s]+)/v1", said)) is None:
        line = process.stderr.readline()
        if not line:
            raise SystemExit(said)
        said += line
    return process, found[1]


def wait(page: Any, expression: str) -> None:
    end = time.monotonic() + 120
    while not page.evaluate(expression):
        if time.monotonic() > end:
            raise SystemExit(f"{expression} is still not true")
        page.wait_for_timeout(50)


def take(page: Any, name: str) -> None:
    page.wait_for_timeout(400)
    path = IMAGES / f"inspector-{name}.png"
    page.screenshot(path=path)
    subprocess.run(
        ["pngquant", "--force", "--skip-if-larger", "--output", path, "--quality", "60-95", path], check=True
    )


def ask(page: Any) -> None:
    page.fill("#prompt", PROMPT)
    for name, value in PARAMS.items():
        page.fill(f"#p-{name}", str(value))
        page.locator(f"#p-{name}").blur()
    page.click("button.primary:has-text('Run')")
    wait(page, "unspool.app.current?.state === 'done'")
    page.click(".unlikely button >> nth=0")
    page.wait_for_selector(".candidates .removed")


def write(page: Any) -> None:
    ask(page)
    take(page, "write")


def branches(page: Any) -> None:
    index = page.evaluate("unspool.app.cursor")
    page.locator(".candidates button.branch >> nth=0").click()
    wait(page, "unspool.app.current.parent !== null && unspool.app.current.state === 'done'")
    page.evaluate(f"unspool.app.show(unspool.app.tree.list()[0], {index})")
    page.evaluate("unspool.app.go('branches')")
    page.fill("#siblings", "2")
    page.click("#grow")
    wait(page, "unspool.app.tree.list().every((one) => one.state !== 'running')")
    take(page, "branches")


def engine(page: Any) -> None:
    page.evaluate("unspool.app.go('engine')")
    page.wait_for_selector(".key.block-free")
    page.wait_for_timeout(1500)
    take(page, "engine")


def verify(page: Any) -> None:
    page.evaluate("unspool.app.show(unspool.app.tree.list()[0])")
    page.evaluate("unspool.app.go('verify')")
    page.click("#verify")
    page.wait_for_selector("#verdict")
    take(page, "verify")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the path of the browser")
    path = parser.parse_args().chromium
    from playwright.sync_api import sync_playwright

    process, address = start_server()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for theme, views in (("light", (write, branches, verify)), ("dark", (ask, engine))):
                page = browser.new_page(viewport=SIZE, color_scheme=theme)
                page.set_default_timeout(120_000)
                page.goto(address)
                page.wait_for_selector("#prompt")
                for view in views:
                    view(page)
            browser.close()
    finally:
        process.kill()
    total = sum(picture.stat().st_size for picture in IMAGES.glob("inspector-*.png"))
    print(f"{total:,} bytes in all")
    return 0 if total < MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())

"""How large the pages of `graph dump` and `graph diff` are, how long they take to make and to open.

usage: python benchmarks/report.py [--config examples/configs/v4-flash.json] [--runs 5] [--out results.json]

Needs chromium, chromedriver and selenium. A page is opened from disk in a headless window; the time ends
when its script has drawn the first view.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parent.parent
VIEWS = {
    "overview": "",
    "layer": "#tab=graph&module=layers.4",
    "traced layer": "#tab=graph&module=layers.4&snapshot=0",
    "changes": "#tab=changes&snapshot=2",
}


def make(arguments: list[str], out: Path) -> float:
    """Seconds of a whole process that writes a page."""
    program = Path(sys.executable).with_name("rewright")
    begin = time.perf_counter()
    subprocess.run([program, "graph", *arguments, "--format", "html", "-o", out], check=True)
    return time.perf_counter() - begin


def window() -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1500,950"):
        options.add_argument(switch)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def open_seconds(driver: Any, page: Path, address: str, runs: int) -> dict[str, float]:
    """Median and worst time until a view is drawn."""
    times = []
    for _ in range(runs):
        driver.get("about:blank")
        begin = time.perf_counter()
        driver.get(page.as_uri() + address)
        while driver.execute_script("return document.documentElement.dataset.ready") != "1":
            time.sleep(0.005)  # `get` may return while the window still shows what it had before
        times.append(time.perf_counter() - begin)
    return {"median": round(statistics.median(times), 3), "worst": round(max(times), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", default="examples/configs/v4-flash.json")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = ROOT / given.config
    commands = {
        "dump": ["dump", str(config), "--target", "sm80"],
        "diff": ["diff", f"{config}@layout?no-pass=fuse_norm_quant", f"{config}@layout"],
    }
    pages: dict[str, Any] = {}
    driver = window()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, arguments in commands.items():
                page = Path(folder) / f"{name}.html"
                seconds = make(arguments, page)
                views = VIEWS if name == "dump" else {"overview": ""}
                pages[name] = {
                    "bytes": page.stat().st_size,
                    "seconds_to_make": round(seconds, 2),
                    "seconds_to_open": {
                        view: open_seconds(driver, page, address, given.runs)
                        for view, address in views.items()
                    },
                }
        browser = driver.capabilities["browserVersion"]
    finally:
        driver.quit()
    result = {
        "date": date.today().isoformat(),
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "chromium": browser},
        "config": given.config,
        "runs": given.runs,
        "pages": pages,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

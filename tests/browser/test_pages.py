"""The pages in a real browser: they open, answer questions by mouse and keyboard, and log no error.

Pictures of what was shown lie in pytest's temporary folder, or where `--artifacts DIR` says.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def flash_page(run_cli: Cli, repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all 43 layers of V4-Flash."""
    out = tmp_path_factory.mktemp("pages") / "report.html"
    config = repo_root / "examples/configs/v4-flash.json"
    done = run_cli("graph", "dump", config, "--target", "sm80", "--format", "html", "-o", out)
    assert done.code == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def diff_page(run_cli: Cli, tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fuse_norm_quant` does to the example."""
    out = tmp_path_factory.mktemp("pages") / "diff.html"
    specs = f"{tiny_v4}@layout?no-pass=fuse_norm_quant", f"{tiny_v4}@layout"
    assert run_cli("graph", "diff", *specs, "--format", "html", "-o", out).code == 0
    return out


class Browser:
    """A window, and what the tests do in it."""

    def __init__(self, driver: Any, pictures: Path):
        self.driver, self.pictures = driver, pictures

    def open(self, page: Path, address: str = "") -> None:
        """Open a page; its script has drawn the first view then."""
        self.driver.get("about:blank")
        self.driver.get(page.as_uri() + address)
        # `get` may return while the window still shows what it had before.
        until = time.monotonic() + 20
        while self.driver.execute_script("return document.documentElement.dataset.ready") != "1":
            assert time.monotonic() < until, self.errors()
            time.sleep(0.02)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def keys(self, *keys: str) -> None:
        """Press keys, whatever has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def picture(self, name: str) -> None:
        assert self.driver.save_screenshot(str(self.pictures / f"{name}.png"))

    def dark(self, on: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@pytest.fixture(scope="module")
def window(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    switches = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1500,950"]
    if os.geteuid() == 0:
        switches.append("--no-sandbox")  # chromium has no sandbox for root
    for switch in switches:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    given = request.config.getoption("--artifacts")
    pictures = Path(given) if given else tmp_path_factory.mktemp("pictures")
    pictures.mkdir(parents=True, exist_ok=True)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield Browser(driver, pictures)
    driver.quit()


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """The window; afterwards nothing must stand in its console."""
    window.dark(False)
    yield window
    assert window.errors() == []


def test_the_report_of_v4_flash_opens(browser: Browser, flash_page: Path) -> None:
    assert flash_page.stat().st_size < 5_000_000
    browser.open(flash_page)
    assert "3,030 → 666" in browser.text("#view")
    assert "559" in browser.text("#view")
    assert len(browser.all(".strip button")) == 43
    assert "layers 6, 8 … 40: same" in browser.text("#tree")
    browser.picture("overview")


def test_search_and_open_a_node(browser: Browser, flash_page: Path) -> None:
    """From nothing to the kernel of layer 4's attention with the keyboard alone."""
    browser.open(flash_page)
    browser.keys("/", "layers.4.attn.o.groups")
    assert browser.text("#hits li").startswith("layers.4.attn.o.groups")
    browser.picture("search")
    browser.keys("\ue007")
    assert browser.text("#panel h1") == "attention"
    panel = browser.text("#panel")
    for said in (
        "sm80.attention_split",
        "sm80.attention_combine",
        "rule attention: 6 nodes -> 1",
        "no kernel of sm80",
    ):
        assert said in panel
    assert browser.text("#view h1") == "layers.4.attn"
    assert len(browser.all("svg .box.here")) == 1
    browser.picture("node")
    browser.keys("\ue00c")
    assert not browser.one("#panel").is_displayed()


def test_a_value_that_is_gone_is_found_where_it_was(browser: Browser, flash_page: Path) -> None:
    browser.open(flash_page)
    browser.keys("/", "layers.4.attn.q_norm", "\ue007")
    assert browser.text("#panel h1") == "rms_norm"
    assert "rms_norm_quant" in browser.text("#panel")
    assert browser.text('#way [aria-pressed="true"]').startswith("fuse_shared_input")


def test_stages_and_passes_can_be_walked(browser: Browser, flash_page: Path) -> None:
    browser.open(flash_page, "#tab=graph&module=layers.4.attn")
    few = len(browser.all("svg .box"))
    browser.one('#way [data-snapshot="0"]').click()
    assert len(browser.all("svg .box")) > 2 * few
    assert "55 op nodes at traced" in browser.text("#view")
    browser.picture("traced")
    browser.keys("]")
    assert browser.text('#way [aria-pressed="true"]').startswith("canonicalize")
    browser.driver.back()
    assert browser.text('#way [aria-pressed="true"]').startswith("traced")


def test_a_pass_shows_what_it_changed(browser: Browser, flash_page: Path) -> None:
    browser.open(flash_page)
    (row,) = [r for r in browser.all("tr.pick") if r.text.startswith("fuse_norm_quant")]
    row.click()
    assert "2,626 → 2,497 op nodes" in browser.text("#view")
    browser.one("details.part > summary").click()
    assert browser.all(".chip.removed")
    assert browser.all(".chip.added")
    browser.picture("pass")
    browser.one(".chip.added").click()
    assert browser.text("#panel h1") == "rms_norm_quant"


def test_near_misses_and_kernels_have_reasons_and_bytes(browser: Browser, flash_page: Path) -> None:
    browser.open(flash_page)
    browser.keys("5")
    assert "faithful numerics keep the rounding" in browser.text("#view")
    browser.picture("near-misses")
    browser.keys("6")
    assert "sm80.experts_in" in browser.text("#view")
    browser.picture("kernels")
    browser.keys("4")
    assert "11,260,968,508" in browser.text("#view")
    browser.picture("traffic")


def test_boxes_can_be_walked_with_arrow_keys(browser: Browser, flash_page: Path) -> None:
    browser.open(flash_page, "#tab=graph&module=layers.4.ffn")
    browser.driver.execute_script("document.querySelector('svg .box:not(.outside)').focus()")
    before = browser.driver.switch_to.active_element.get_attribute("aria-label")
    browser.keys("\ue015")
    after = browser.driver.switch_to.active_element.get_attribute("aria-label")
    assert before != after
    browser.keys("\ue007")
    assert browser.one("#panel").is_displayed()


def test_the_dark_page(browser: Browser, flash_page: Path) -> None:
    browser.dark(True)
    browser.open(flash_page, "#tab=graph&module=layers.4.attn&node=layers.4.attn.o.groups")
    assert (
        browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        == "rgb(20, 23, 28)"
    )
    browser.picture("dark")


def test_two_graphs_side_by_side(browser: Browser, diff_page: Path) -> None:
    browser.open(diff_page)
    assert "What did it" in browser.text("#view")
    browser.picture("diff-overview")
    browser.one('#tree [title="layers.2"]').click()
    assert len(browser.all(".sides svg")) == 2
    left, right = browser.all(".sides > div")
    assert left.find_elements("css selector", ".box.removed")
    assert right.find_elements("css selector", ".box.added")
    browser.picture("diff-graph")
    browser.keys("3")
    assert browser.all("details.part")
    browser.picture("diff-changes")


def test_a_page_asks_the_network_for_nothing(browser: Browser, flash_page: Path) -> None:
    browser.open(flash_page)
    asked = browser.driver.execute_script("return performance.getEntriesByType('resource').length")
    assert asked == 0

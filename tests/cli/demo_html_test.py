#!/usr/bin/env python3
"""Runs examples/digits, opens its page in a headless Chromium and compares what it shows with --json.

usage: demo_html_test.py [PROGRAM] [SCREENSHOT_DIRECTORY]     (or the environment variable OCTILE_DIGITS)
Needs selenium, chromium and chromedriver; without them it exits with 77, which CTest counts as skipped.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
except ImportError:
    print("skipped: no selenium")
    sys.exit(77)

WIDTHS = (400, 1200)
SEEDS, EPOCHS = 2, 3

# Elements outside the viewport, as text. Charts are checked too: an SVG clips what leaves its box, so their
# labels are compared with the box itself.
STICKING_OUT = """
const out = [];
const width = document.documentElement.clientWidth;
for (const e of document.querySelectorAll('body *')) {
  const box = e.getBoundingClientRect();
  if (box.right > width + 0.5 || box.left < -0.5) out.push(`${e.tagName} ${box.left}..${box.right}: ${e.textContent}`);
}
for (const svg of document.querySelectorAll('svg.chart')) {
  const frame = svg.getBoundingClientRect();
  for (const e of svg.querySelectorAll('text')) {
    const box = e.getBoundingClientRect();
    if (box.left < frame.left - 0.5 || box.right > frame.right + 0.5 || box.top < frame.top - 0.5 ||
        box.bottom > frame.bottom + 0.5) out.push(`label ${e.textContent} leaves its chart`);
  }
}
return out;
"""

# Pairs of labels in one chart that overlap.
COLLIDING = """
const out = [];
for (const svg of document.querySelectorAll('svg.chart')) {
  const texts = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
  texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
    if (p.left < q.right && q.left < p.right && p.top + 2 < q.bottom && q.top + 2 < p.bottom) out.push(`${a} | ${b}`);
  }));
}
return out;
"""

failures = []


def check(good, what):
    if not good:
        failures.append(what)
        print("FAILED:", what)


def points(value, f32):
    text = f"{abs(value - f32):.2f}"
    return ("" if text == "0.00" else "-" if value < f32 else "+") + text


def cells(browser, table, row):
    found = browser.find_elements(By.CSS_SELECTOR, f"#{table} tr[data-id='{row}'] td")
    return {cell.get_attribute("data-key"): cell.text for cell in found}


def check_row(browser, table, row, f32, expected):
    shown = cells(browser, table, row["id"])
    accuracy = row["accuracy"]
    expected |= {
        "accuracy": f"{accuracy['mean']:.2f}",
        "range": f"{accuracy['lowest']:.2f} to {accuracy['highest']:.2f}",
        "difference": points(accuracy["mean"], f32["accuracy"]["mean"]),
    }
    for key, value in expected.items():
        check(shown.get(key) == value, f"{table}, {row['id']}, {key}: the page shows {shown.get(key)}, JSON says {value}")


def check_content(browser, result):
    ways, formats = result["ways"], result["formats"]
    check([w["id"] for w in ways] == ["f32", "int8_forward", "int8"], "three ways")
    check([f["id"] for f in formats] == ["f32", "w8a8", "w4"], "three formats")
    for table, rows in (("ways", ways), ("formats", formats)):
        shown = browser.find_elements(By.CSS_SELECTOR, f"#{table} tbody tr")
        check(len(shown) == len(rows), f"{table}: {len(shown)} rows, expected {len(rows)}")
    for way in ways:
        check_row(browser, "ways", way, ways[0], {
            "loss": f"{way['loss']['mean']:.5f}",
            "seconds": f"{way['seconds']['mean']:.2f}",
            "kept_bytes": f"{way['kept_bytes']:,}",
        })
        for kind, count in (("mean", 1), ("seed", SEEDS)):
            curves = browser.find_elements(By.CSS_SELECTOR, f"svg.chart path.{kind}.{way['id']}")
            check(len(curves) == count, f"{way['id']}: {len(curves)} curves of kind {kind}, expected {count}")
            for curve in curves:
                drawn = len(re.findall("[ML]", curve.get_attribute("d")))
                check(drawn == EPOCHS, f"{way['id']}: a curve of {drawn} points, expected {EPOCHS}")
        dots = browser.find_elements(By.CSS_SELECTOR, f"svg.chart circle.{way['id']}")
        check(len(dots) == SEEDS, f"{way['id']}: {len(dots)} dots, expected {SEEDS}")
    for fmt in formats:
        check_row(browser, "formats", fmt, formats[0], {"weight_bytes": f"{fmt['weight_bytes']:,}"})


def check_result(result):
    """What holds for any settings: sizes that follow from the shapes, and possible values."""
    settings, ways, formats = result["settings"], result["ways"], result["formats"]
    batch, hidden = settings["batch"], settings["hidden"]
    inputs = 64 + 2 * hidden
    check(ways[0]["kept_bytes"] == 4 * batch * inputs, "f32 keeps the inputs of the three layers")
    int8 = batch * (inputs + 3 * 4 + 2 * hidden // 8)  # bytes, a scale per row and layer, a bit per ReLU
    check(ways[1]["kept_bytes"] == ways[2]["kept_bytes"] == int8, f"int8 keeps {int8} bytes")
    weights = 64 * hidden + hidden * hidden + hidden * 10
    check(formats[0]["weight_bytes"] == 4 * weights, "f32 weights")
    check(formats[1]["weight_bytes"] == weights + 4 * (2 * hidden + 10), "W8A8 weights and a scale per channel")
    check(formats[2]["weight_bytes"] == weights // 2 + 4 * weights // 32, "W4 weights and a scale per group of 32")
    for row in ways + formats:
        check(len(row["accuracy"]["seeds"]) == SEEDS, f"{row['id']}: an accuracy per seed")
        check(80 < row["accuracy"]["mean"] <= 100, f"{row['id']}: accuracy {row['accuracy']['mean']} after {EPOCHS} epochs")
    for way in ways:
        for curve in way["curves"]:
            check(len(curve) == EPOCHS and curve[-1] < curve[0] / 2, f"{way['id']}: the loss falls: {curve}")
    # The int8 products are not f32 in disguise.
    check(ways[0]["loss"]["mean"] != ways[1]["loss"]["mean"] != ways[2]["loss"]["mean"], "three different losses")
    check(ways[0]["accuracy"] == formats[0]["accuracy"], "the f32 network is the one that is quantized")


def open_browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = next((p for p in ("/usr/bin/chromedriver", "/usr/lib/chromium/chromedriver") if os.path.exists(p)), None)
    return webdriver.Chrome(service=Service(driver) if driver else Service(), options=options)


def set_view(browser, width, scheme):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia",
                            {"features": [{"name": "prefers-color-scheme", "value": scheme}]})


def screenshot(browser, width, path):
    height = browser.execute_script("return document.documentElement.scrollHeight")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
    browser.save_screenshot(str(path))


def requests(browser):
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            yield message["params"]["request"]["url"]


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OCTILE_DIGITS", "build/octile-digits")
    if not os.path.exists(program):
        print("skipped: there is no program", program)
        sys.exit(77)
    with tempfile.TemporaryDirectory() as directory:
        shots = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else directory)
        shots.mkdir(parents=True, exist_ok=True)
        page = pathlib.Path(directory, "page.html")
        command = [program, "--seeds", str(SEEDS), "--epochs", str(EPOCHS), "--hidden", "128", "--json"]
        run = subprocess.run(command + ["--html", str(page)], check=True, stdout=subprocess.PIPE)
        result = json.loads(run.stdout)
        check(result["html"] == str(page), "JSON names the page")
        check_result(result)
        try:
            browser = open_browser()
        except WebDriverException as error:
            print("skipped: no browser:", error.msg)
            sys.exit(1 if failures else 77)
        try:
            browser.get(page.as_uri())
            check_content(browser, result)
            for width in WIDTHS:
                for scheme in ("light", "dark"):
                    set_view(browser, width, scheme)
                    for found in browser.execute_script(STICKING_OUT):
                        check(False, f"at {width} px: {found}")
                    for found in browser.execute_script(COLLIDING):
                        check(False, f"at {width} px, labels overlap: {found}")
                    screenshot(browser, width, shots / f"demo-{width}-{scheme}.png")
            for entry in browser.get_log("browser"):
                check(False, f"console: {entry['message']}")
            foreign = [url for url in requests(browser) if not url.startswith((page.as_uri(), "data:", "chrome"))]
            check(not foreign, f"the page asks for {foreign}")
            check(not browser.find_elements(By.TAG_NAME, "script"), "the page has no scripts")
        finally:
            browser.quit()
    print(f"{len(failures)} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

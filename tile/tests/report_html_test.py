#!/usr/bin/env python3
"""Opens the tile language's reports in a headless Chromium: what they show, count, and do with the keyboard.

usage: report_html_test.py [TILE_REPORT_TEST] [SCREENSHOT_DIRECTORY]
TILE_REPORT_TEST is the test program that writes the pages (or the environment variable OCTILE_REPORT_TEST). Needs
selenium, chromium and chromedriver; without them it exits with 77, which CTest counts as skipped.
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
    from selenium.webdriver.common.keys import Keys
except ImportError:
    print("skipped: no selenium")
    sys.exit(77)

WIDTHS = (400, 1280)
PAGES = {  # verdict, problem cards
    "masked_add": ("correct", 0), "masked_add_wrong": ("unsafe", 2), "long_sum_wrong": ("unsafe", 1),
    "outer_add_wrong": ("wrong", 0), "softmax": ("correct", 0), "matmul": ("correct", 0),
    "matmul_wrong": ("wrong", 0), "overlap": ("unsafe", 1),
    "racy_quantizer": ("unsafe", 2), "negative": ("unsafe", 2), "histogram": ("unsafe", 1),
    "sampled": ("unchecked", 0), "large": ("unchecked", 0), "hostile": ("unchecked", 0),
}
HOSTILE = "</script><script>document.title = 'broken'</script><!-- <b>\"&'"

# Elements that stick out of the viewport and are in no box that scrolls.
STICKING_OUT = """
const out = [];
const width = document.documentElement.clientWidth;
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('.scroll, .grid, .operations, .unseen')) continue;
  const box = e.getBoundingClientRect();
  if (!box.width || (box.right <= width + 0.5 && box.left >= -0.5)) continue;
  out.push(`${e.tagName}.${e.className} ${box.left}..${box.right}`);
}
return out;
"""

# Figures that overlap.
COLLIDING = """
const boxes = [...document.querySelectorAll('canvas')].map(e => e.getBoundingClientRect());
const out = [];
boxes.forEach((p, i) => boxes.slice(i + 1).forEach((q, j) => {
  if (p.left >= q.right - 1 || q.left >= p.right - 1 || p.top >= q.bottom - 1 || q.top >= p.bottom - 1) return;
  out.push(`${i} and ${i + 1 + j}`);
}));
return out;
"""

# Text whose contrast with what is behind it is below 4.5.
FAINT = """
const parse = (text) => { const m = text.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
const light = ([r, g, b]) => {
  const f = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
};
const behind = (e) => {
  const layers = [];
  for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    const srgb = c.startsWith('color(') ? parse(c.slice(10)).map((v, i) => i < 3 ? v * 255 : v) : parse(c);
    if (srgb[3] > 0) layers.push(srgb);
    if (srgb[3] === 1) break;
  }
  let now = [255, 255, 255];
  for (const layer of layers.reverse()) now = now.map((v, i) => v + (layer[i] - v) * layer[3]);
  return now;
};
const out = new Set();
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('script, noscript, .unseen, select') || !e.getClientRects().length) continue;
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
  const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) out.add(`${e.tagName}.${e.className} ${ratio.toFixed(2)}: ${e.textContent.slice(0, 30)}`);
}
return [...out];
"""

# Pixels of a tensor's picture: how many are of each colour.
PIXELS = """
const c = document.querySelector(`figure[data-tensor="${arguments[0]}"] canvas`);
const copy = Object.assign(document.createElement('canvas'), {width: c.width, height: c.height});
const g = copy.getContext('2d', {willReadFrequently: true});
g.drawImage(c, 0, 0);
const data = g.getImageData(0, 0, c.width, c.height).data, count = {};
for (let i = 0; i < data.length; i += 4) {
  const name = [data[i], data[i + 1], data[i + 2]].join(',');
  count[name] = (count[name] || 0) + 1;
}
return count;
"""
LOAD, STORE, BAD, WRONG, SOFT = "43,120,184", "221,122,31", "200,16,46", "181,23,158", "91,99,110"
RACE = "242,194,0"

failures = []


def check(good, what):
    if not good:
        failures.append(what)
        print("FAILED:", what)


def open_browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = next((p for p in ("/usr/bin/chromedriver", "/usr/lib/chromium/chromedriver") if os.path.exists(p)), None)
    return webdriver.Chrome(service=Service(driver) if driver else Service(), options=options)


def set_view(browser, width, scheme, height=900):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia",
                            {"features": [{"name": "prefers-color-scheme", "value": scheme}]})


def settle(browser):
    """Waits until the request has been drawn."""
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))")


def one(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def all_of(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def press(browser, selector, *keys):
    one(browser, selector).send_keys(*keys)
    settle(browser)


def pixels(browser, tensor):
    return browser.execute_script(PIXELS, tensor)


def near(count, colour):
    """Pixels of about that colour: lines are smoothed."""
    wanted = [int(v) for v in colour.split(",")]
    return sum(n for name, n in count.items() if all(abs(int(v) - w) < 30 for v, w in zip(name.split(","), wanted)))


def shown_slice(browser, tensor):
    return one(browser, f"figure[data-tensor={tensor}] .slicers output").text


def listed(browser):
    """The elements of each access of the selected program."""
    return [code.text for code in all_of(browser, ".operations code")]


def set_mode(browser, mode):
    browser.execute_script(f"document.querySelector('#modes input[value={mode}]').click()")
    settle(browser)


def requests(browser):
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            yield message["params"]["request"]["url"]


def read_totals(path):
    totals = {"site": [], "tensor": [], "finding": []}
    for line in path.read_text().splitlines():
        key, *values = line.split()
        if key in totals:
            totals[key].append([int(v) for v in values])
        else:
            totals[key] = int(values[0])
    return totals


def check_page(browser, name, totals):
    """What every page must say, compared with what the program counted."""
    verdict, cards = PAGES[name]
    check(one(browser, "#verdict").get_attribute("data-verdict") == verdict, f"{name}: the verdict is {verdict}")
    check(len(all_of(browser, ".problem")) == cards == min(totals["findings"], 20), f"{name}: {cards} problem cards")
    for link in all_of(browser, ".counts a"):
        check(len(all_of(browser, link.get_dom_attribute("href"))) == 1, f"{name}: a link to {link.text}")
    agrees = one(browser, "#recount").get_attribute("data-agrees")
    check(agrees == ("sampled" if totals["left_out"] else "yes"), f"{name}: the recount says {agrees}")
    rows = browser.execute_script("return recount()")
    counted = [row["counted"] for row in rows]
    sites, tensors = totals["site"], totals["tensor"]
    outside = {}
    racing = [0] * len(tensors)
    found_at = browser.execute_script("return launch.findings.map(f => [f.site, launch.sites[f.site].tensor])")
    for (site, tensor), (kind, count) in zip(found_at, totals["finding"]):
        if kind == 0:
            outside[site] = count
        elif kind == 4:
            racing[tensor] += count
    expected = [v for i, site in enumerate(sites) for v in (*site[1:], outside.get(i, 0))]
    expected += [v for (read, written, _), races in zip(tensors, racing) for v in (read, written, races)]
    check(counted == expected, f"{name}: the page shows {counted}, the program counted {expected}")
    if not totals["left_out"]:
        check([row["here"] for row in rows] == expected, f"{name}: the recount gives {[row['here'] for row in rows]}")
    else:
        less = all(0 < row["here"] < row["counted"] for row in rows if row["counted"] > 0)
        check(less, f"{name}: a sample has less of everything")
    shown = [[int(cell.text.replace(",", "")) for cell in row.find_elements(By.TAG_NAME, "td")[2:5]]
             for row in all_of(browser, "table.tensors tbody tr")]
    check(shown == tensors, f"{name}: the table of tensors shows {shown}, expected {tensors}")
    lines = [[int(row.find_element(By.TAG_NAME, "th").text.split(":")[0]),
              *(int(row.find_elements(By.TAG_NAME, "td")[i].text.replace(",", "")) for i in (2, 4))]
             for row in all_of(browser, "table.traffic tbody tr")]
    check(lines == [site[:3] for site in sites], f"{name}: the table of lines shows {lines}")
    sources = all_of(browser, "table.source tr.accessed")
    if name != "hostile":
        check(len(sources) == len({site[0] for site in sites}), f"{name}: a marked line for each that accesses")


def check_keyboard(browser):
    """On the matmul: programs, accesses, pictures, slices."""
    shown = lambda: one(browser, "#programs .readout").text
    check(shown().startswith("Program (0, 0, 0)"), "program 0 is selected first")
    press(browser, "#programs canvas", Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    check(shown().startswith("Program (1, 1, 0)"), f"arrow keys: {shown()}")
    press(browser, "#programs canvas", Keys.PAGE_DOWN)
    check(shown().startswith("Program (1, 1, 1)"), f"page down goes to the next plane: {shown()}")
    items = all_of(browser, ".operations li")
    check(len(items) == 7, f"three steps of two loads, and a store: {len(items)}")
    press(browser, ".operations", Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    check(items[1].get_attribute("aria-selected") == "true", "arrow down chooses the second access")
    press(browser, ".operations", Keys.ESCAPE)
    check(not all_of(browser, ".operations li[aria-selected=true]"), "Escape chooses none")
    press(browser, "#programs canvas", Keys.ESCAPE)
    check(shown() == "All programs together.", "Escape selects all programs")
    press(browser, "figure[data-tensor=z] canvas", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    text = one(browser, "figure[data-tensor=z] .readout").text
    check(text.startswith("z[0, 1, 1] = "), f"z: {text}")
    check("written 1 time, last by program (0, 0, 0) at line" in text, f"z: {text}")
    press(browser, "figure[data-tensor=z] canvas", Keys.ENTER)
    check(shown().startswith("Program (0, 0, 0)"), "Enter selects who wrote it")
    press(browser, "figure[data-tensor=z] input[type=range]", Keys.ARROW_RIGHT)
    press(browser, "figure[data-tensor=z] canvas", Keys.ARROW_RIGHT)
    text = one(browser, "figure[data-tensor=z] .readout").text
    check(text.startswith("z[1, 0, 0]"), f"the slicer shows the next plane: {text}")
    whole = browser.execute_script("return pictures[2].view.w")
    press(browser, "figure[data-tensor=z] canvas", "+")
    check(browser.execute_script("return pictures[2].view.w") < whole, "plus zooms in")
    press(browser, "figure[data-tensor=z] canvas", "0")
    check(browser.execute_script("return pictures[2].view.w") == whole, "0 shows all")
    press(browser, "#modes input:checked", Keys.ARROW_RIGHT)
    mode = one(browser, "figure[data-tensor=x] canvas").get_attribute("data-mode")
    check(mode == "reads", f"arrow keys change the mode: {mode}")
    press(browser, "table.source tr.accessed", Keys.ENTER)
    check(len(all_of(browser, "table.source tr.selected")) == 1, "Enter selects a line")
    press(browser, "#programs canvas", Keys.SPACE)
    check(one(browser, "#programs .tools button:nth-child(2)").text == "■ stop", "space plays")
    press(browser, "#programs canvas", Keys.SPACE)
    # Whatever can be clicked can be reached.
    for selector in ("#programs canvas", "figure canvas", ".operations", "table.source tr.accessed"):
        reached = all(e.get_property("tabIndex") == 0 for e in all_of(browser, selector))
        check(reached, f"{selector} can be reached by the keyboard")


def check_pictures(browser, name):
    if name == "masked_add":
        check(pixels(browser, "x").get(LOAD, 0) > 0, "loads are drawn")
        check(BAD not in pixels(browser, "x"), "nothing red in a clean picture")
        check(near(pixels(browser, "z"), SOFT) == 0, "nothing hatched either")
        for mode in ("reads", "writes", "redundancy", "first", "values", "difference"):
            before = pixels(browser, "z")
            set_mode(browser, mode)
            check(one(browser, "figure[data-tensor=z] canvas").get_attribute("data-mode") == mode, f"mode {mode}")
            check(pixels(browser, "z") != before, f"mode {mode} shows another picture")
        check(WRONG not in pixels(browser, "z"), "no wrong value in a correct one")
    elif name == "masked_add_wrong":
        # 220 elements in a row, 20 of them outside; the rows of pixels are alike.
        count = pixels(browser, "x")
        share = count.get(BAD, 0) / sum(count.values())
        check(abs(share - 20 / 220) < 0.02, f"20 of 220 elements are red: {share:.3f}")
        check("20 lanes out of bounds" in one(browser, "figure[data-tensor=x] .readout").text, "the margin in words")
        press(browser, "#programs canvas", Keys.HOME)
        check(BAD not in pixels(browser, "x"), "program 0 goes nowhere out of bounds: pale red only")
        all_of(browser, ".problem button")[0].click()
        settle(browser)
        check(one(browser, "#programs .readout").text.startswith("Program 6"), "a card shows its program")
        check(pixels(browser, "x").get(BAD, 0) > 0, "and its lanes")
    elif name == "long_sum_wrong":
        set_mode(browser, "difference")
        text = one(browser, "figure[data-tensor=z] .legend").text
        check(text == "4 wrong", f"sums that are NaN are wrong by no number: {text}")
        set_mode(browser, "footprint")
    elif name == "outer_add_wrong":
        text = one(browser, "figure[data-tensor=z] .readout").text
        check("300 elements never written, hatched" in text, f"never written: {text}")
        check(near(pixels(browser, "z"), SOFT) > 50, "the hatching")
        set_mode(browser, "difference")
        check(WRONG in pixels(browser, "z"), "wrong values are drawn")
        set_mode(browser, "footprint")
        rows = all_of(browser, "table.wrong tr[data-wrong]")
        check(len(rows) == 12, f"twelve wrong elements: {len(rows)}")
        press(browser, "table.wrong tr[data-wrong='0']", Keys.ENTER)
        text = one(browser, "#explorer").text
        check("z[0, 7] was stored last by program (0, 0) at line" in text, f"explorer: {text}")
        check(text.count("line") == 3, f"explorer: the store and two loads: {text}")
        nobody = next(i for i, row in enumerate(rows) if "never written" in row.text)
        press(browser, f"table.wrong tr[data-wrong='{nobody}']", Keys.ENTER)
        check("No record of this launch stores" in one(browser, "#explorer").text, "explorer: never written")
    elif name == "matmul_wrong":
        check(shown_slice(browser, "z") == "2 of 3", f"the slice with the wrong values: {shown_slice(browser, 'z')}")
        text = one(browser, "#programs .readout").text
        check(text.startswith("Program (0, 0, 2)"), f"the program that stored the first wrong value: {text}")
        check(shown_slice(browser, "x") == "2 of 3", "nothing is wrong in x: the slice that this program reads")
        check(not all_of(browser, "figure[data-tensor=x] .slicers button"), "and there is no problem to go to")
        check(WRONG in pixels(browser, "z"), "the wrong values are in sight")
        set_mode(browser, "footprint")
        check(pixels(browser, "x").get(LOAD, 0) > 0, "and what it reads of x")
    elif name == "overlap":
        check(shown_slice(browser, "z") == "1 of 3", f"the first slice with a race: {shown_slice(browser, 'z')}")
        text = one(browser, "figure[data-tensor=z] .readout").text
        check("10 elements in a race, marked yellow" in text, f"the race in words: {text}")
        here = near(pixels(browser, "z"), RACE)
        check(here > 50, f"racing elements are yellow: {here} pixels")
        go_on = "figure[data-tensor=z] .slicers button"
        press(browser, go_on, Keys.ENTER)
        check(shown_slice(browser, "z") == "2 of 3", f"on to the next slice: {shown_slice(browser, 'z')}")
        check(near(pixels(browser, "z"), RACE) > here, "which has more of them")
        press(browser, go_on, Keys.ENTER)
        check(shown_slice(browser, "z") == "1 of 3", f"and back to the first: {shown_slice(browser, 'z')}")
        press(browser, "figure[data-tensor=z] input[type=range]", Keys.ARROW_LEFT)
        check(near(pixels(browser, "z"), RACE) == 0, "no race in the slice before")
        check("race" in [span.text for span in all_of(browser, "#modes .key span")], "the colour is explained")
        press(browser, "#programs canvas", Keys.HOME)
        check(not all_of(browser, ".operations .race"), "program 0 races with nobody")
        check(listed(browser) == ["z[0, 0, 0 … 7]"], f"{listed(browser)}")
        for _ in range(5):
            press(browser, "#programs canvas", Keys.ARROW_RIGHT)
        check(listed(browser) == ["z + (40 … 48)"], f"the row goes on in the next one: {listed(browser)}")
        races = [span.text for span in all_of(browser, ".operations .race")]
        check(races == ["2 in a race"], f"two elements of program 5 race: {races}")
    elif name == "negative":
        check("1 lane out of bounds" in one(browser, "figure[data-tensor=x] .readout").text, "an index below 0")
        text = one(browser, "figure[data-tensor=z] .readout").text
        check("60 elements read before anybody wrote them" in text, f"uninitialized: {text}")
        check(near(pixels(browser, "z"), BAD) > 50, "hatched red")
    elif name == "large":
        text = one(browser, "figure[data-tensor=x] .legend").text
        check("a cell is 3 × 3 elements" in text, f"1500 x 1100 elements in at most 512 x 512 cells: {text}")


def check_accesses(browser, name):
    """The list names elements, and no variables: a kernel's own i and j are others."""
    expected = {
        "masked_add": {"x[0 … 31]", "z[0 … 31]"},
        "softmax": {"x[0, 0 … 31]", "x[0, 192 … 199]", "z[0, 32 … 63]"},
        "matmul": {"x[0, 0 … 15, 0 … 15]", "x[0, 0 … 15, 32]", "y[0, 16 … 31, 0 … 15]"},
        "negative": {"x + (-1 … 14)", "z + (0 … 15)"},
        "racy_quantizer": {"x[0 … 127]", "scale[0]", "q[0 … 127]"},
        "histogram": {"h[0, 0 … 1], …", "z[297], …", "z[1 … 94 by 3]"},
    }.get(name, set())
    press(browser, "#programs canvas", Keys.HOME)
    texts = listed(browser)
    check(expected <= set(texts), f"{name}: the accesses are {texts}")
    for text in texts:
        foreign = set(re.findall("[a-z]+", text)) - {"by", "x", "y", "z", "h", "q", "scale"}
        check(not foreign, f"{name}: {foreign} in {text}")


def check_without_scripts(browser, page, name):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get(page.as_uri())
    text = one(browser, "body").text
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    for part in ("Unsafe", "Problems", "Program 6, lane 8, reads x[200]", "Score", "t.load(x + i, i < n0 + 20)",
                 "Line by line", "elements written", "The pictures need scripts"):
        check(part in text, f"{name} without scripts: {part}")
    check("footprint" not in text and "Recount" not in text, f"{name} without scripts: nothing that does not work")


def check_tampered(browser, page, directory):
    """The recount must be able to disagree: a page without its last record."""
    text = page.read_text()
    cut = re.sub(r'("records":\[.*),\d+,\d+,\d+,-?\d+\]\}', r"\1]}", text)
    check(cut != text, "the records can be cut")
    other = pathlib.Path(directory, "tampered.html")
    other.write_text(cut)
    browser.get(other.as_uri())
    check(one(browser, "#recount").get_attribute("data-agrees") == "no", "a page without a record does not add up")


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OCTILE_REPORT_TEST", "build/release/tile/tests/octile_tile_report_test")
    if not os.path.exists(program):
        print("skipped: there is no test program", program)
        sys.exit(77)
    with tempfile.TemporaryDirectory() as directory:
        shots = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else directory)
        shots.mkdir(parents=True, exist_ok=True)
        subprocess.run([program, "--gtest_filter=TileReportPages.*", "--gtest_brief=1"], check=True,
                       env={**os.environ, "OCTILE_REPORT_PAGES": directory})
        try:
            browser = open_browser()
        except WebDriverException as error:
            print("skipped: no browser:", error.msg)
            sys.exit(77)
        try:
            for name in PAGES:
                page = pathlib.Path(directory, name + ".html")
                set_view(browser, 1280, "light")
                browser.get(page.as_uri())
                check_page(browser, name, read_totals(pathlib.Path(directory, name + ".totals")))
                if name == "hostile":
                    check(browser.title == HOSTILE, f"the title is {browser.title}")
                for width in WIDTHS:
                    for scheme in ("light", "dark"):
                        set_view(browser, width, scheme)
                        settle(browser)
                        for what, script in (("sticks out", STICKING_OUT), ("overlap", COLLIDING), ("is faint", FAINT)):
                            for found in browser.execute_script(script):
                                check(False, f"{name} at {width} px, {scheme}, {what}: {found}")
                        if len(sys.argv) > 2:
                            height = browser.execute_script("return document.documentElement.scrollHeight")
                            set_view(browser, width, scheme, height)
                            browser.save_screenshot(str(shots / f"{name}-{width}-{scheme}.png"))
                set_view(browser, 1280, "light")
                settle(browser)
                if name != "hostile" and all_of(browser, "#programs canvas"):
                    check_accesses(browser, name)
                    browser.refresh()
                    settle(browser)
                check_pictures(browser, name)
                if name == "matmul":
                    check_keyboard(browser)
                for entry in browser.get_log("browser"):
                    check(False, f"{name}, console: {entry['message']}")
                foreign = [url for url in requests(browser) if not url.startswith((page.as_uri(), "data:", "chrome"))]
                check(not foreign, f"{name} asks for {foreign}")
            check_without_scripts(browser, pathlib.Path(directory, "masked_add_wrong.html"), "masked_add_wrong")
            check_tampered(browser, pathlib.Path(directory, "matmul.html"), directory)
        finally:
            browser.quit()
    print(f"{len(failures)} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

"""The template of all pages: light and dark, wide and narrow, seen and heard."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from domext_ray.files import ASSETS
from domext_ray.report.page import (
    fill_page,
    format_html,
    format_paragraph,
    format_pictures,
    format_section,
    format_settings,
)
from domext_ray.report.plots import COLORS, MUTED, Picture, draw_legend, new_picture
from domext_ray.storage import Place

STYLE = (ASSETS / "page.html").read_text(encoding="utf-8")


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    for i, color in enumerate(COLORS):
        axes.plot([0, 1], [i, 2 * i], color=color, label=f"run {i}")
    axes.text(0.5, 0.5, "not measured", color=MUTED, fontsize="small")
    axes.set(title="Loss", xlabel="optimiser step")
    draw_legend(axes)


def test_the_colours_of_a_picture_are_those_of_the_page() -> None:
    """On a dark screen they are other ones; one that the page does not know stays."""
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in STYLE.split(":root {")[1:3])
    assert light.keys() == dark.keys() and "@media (prefers-color-scheme: dark)" in STYLE
    page = format_pictures([Picture(draw, "Eight runs.", "Losses of eight runs.")])
    assert re.findall('#[0-9a-f]{6}(?=[;"])', page) == []
    used = set(re.findall(r"var\(--(\w+)\)", page))
    assert {"blue", "orange", "green", "violet", "red", "ochre", "ink", "muted"} <= used <= light.keys()
    assert "paper" not in used, "the picture's ground is the page's own"
    page = format_pictures([Picture(lambda figure: figure.subplots().plot([1, 2], color="#123456"), "", "")])
    assert "stroke: #123456" in page and "stroke: var(--ink)" not in page


def test_two_threads_that_draw_leave_the_settings_as_they_were(tmp_path: Path) -> None:
    before, entered = dict(matplotlib.rcParams), threading.Event()

    def write_picture() -> None:
        with new_picture(Place(tmp_path / "picture.png"), (2, 2)) as figure:
            entered.set()
            draw(figure)
            time.sleep(0.3)

    def draw_slowly(figure: Figure) -> None:
        other.start()
        entered.wait(0.3)
        draw(figure)

    other = threading.Thread(target=write_picture)
    format_pictures([Picture(draw_slowly, "", "")])
    other.join()
    assert entered.is_set() and dict(matplotlib.rcParams) == before


def test_a_picture_has_a_role_and_says_what_it_shows() -> None:
    page = format_pictures([Picture(draw, "a < b", 'Loss of "a" & b.')])
    assert '<svg role="img" aria-label="Loss of &quot;a&quot; &amp; b."' in page
    assert "<figcaption>a &lt; b</figcaption>" in page
    assert ">optimiser step</text>" in page, "text is text"


def test_text_of_a_picture_has_11_pixels_on_a_narrow_screen() -> None:
    for is_wide in [False, True]:
        page = format_pictures([Picture(draw, "", "", is_wide)])
        width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', page)[0])
        smallest = min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", page))
        least = float(re.findall(r"figure\.full svg \{ min-width: (\d+)px", STYLE)[0])  # it scrolls
        assert smallest * min(1.0, (least if is_wide else 368) / width) >= 10.99  # 400 less the page's margins
        assert ('class="full"' in page) == is_wide


def test_a_table_scrolls_in_its_own_box_and_names_its_lines() -> None:
    table = format_html(("", "a & b"), [("first", "<1>"), ("second", Markup("<b>2</b>"))])
    assert table.startswith('<div class="wide"><table class="numbers">')
    assert '<th scope="col">a &amp; b</th>' in table and '<th scope="row">first</th><td>&lt;1&gt;</td>' in table
    assert "<td><b>2</b></td>" in table
    assert "<thead>" not in format_html(("", ""), [("a", "b")])
    assert ".wide { overflow-x: auto;" in STYLE


def test_nothing_to_say_has_no_heading() -> None:
    assert format_section("New words", "", format_paragraph("")) == ""
    page = fill_page("a <b>", [format_section("Options", format_settings("corpus: /home/ann/notes.txt\n"))])
    assert page.count("a &lt;b&gt;") == 2 and "corpus: notes.txt" in page and "ann/" not in page
    assert not re.search("{[{%]", page), "a field of the template was not filled"

"""The drawing: legible whatever ran, every edge traceable, and nothing in it that the ledger did not say."""

import itertools
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from observed_block import drawing, observed, records_of

from dsv3fp8.observe.map.geometry import Drawing, Path, Placed, arrange
from dsv3fp8.observe.map.labels import Text, label
from dsv3fp8.observe.map.layout import Box
from dsv3fp8.observe.map.observed import Observed
from dsv3fp8.observe.map.svg import head, legend_texts, notes, render

VARIANTS: dict[str, dict[str, Any]] = {
    "dsv3": {"name": "dsv3"},
    "dsv3 against bf16": {"name": "dsv3", "against": "bf16"},
    "bf16 against dsv3": {"name": "bf16", "against": "dsv3"},
    "bf16": {"name": "bf16"},
    "dense": {"name": "dsv3", "layer": "dense"},
    "gate after": {"name": "dsv3", "overrides": ("gate=after",)},
    "recomputed": {"name": "dsv3", "overrides": ("recompute=norms_and_up",)},
    "SwiGLU output kept": {"name": "dsv3", "overrides": ("swiglu_output=keep", "operand=bf16")},
    "hybrid": {"name": "hybrid"},
    "one scale per tensor": {"name": "tensorwise"},
    "one scale per row": {"name": "rowwise"},
    "amax history": {"name": "delayed"},
    "gradients in 128×128": {"name": "blockwise_grad"},
    "all in fp32": {"name": "fp32"},
    "caches in bf16": {"name": "bf16_cache"},
    "no query latent": {"name": "dsv3", "q_latent": None},
    "no shared expert": {"name": "dsv3", "shared_experts": 0},
    "wide": {"name": "dsv3", "against": "bf16", "dim": 2048, "expert_ffn": 512, "head_v": 128, "head_nope": 128, "heads": 8},
}


def draw(variant: str) -> Drawing:
    given = dict(VARIANTS[variant])
    return drawing(given.pop("name"), *given.pop("overrides", ()), **given)


def all_texts(drawn: Drawing) -> list[Text]:
    """Every text of the drawing with its place."""
    labels = [label(drawn, cell, False) for cell in drawn.placed.values()]
    inside = [text for texts, tags in labels for text in (*texts, *(tag.text for tag in tags)) if text.text]
    return [*head(drawn), *notes(drawn), *legend_texts(drawn), *inside]


def measured(text: str, size: float, bold: bool) -> float:
    """Width in DejaVu Sans, the widest of the fonts that the drawing names, from the font file itself."""
    font = FT2Font(findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")))
    font.set_size(size, 72)
    return sum(font.load_char(ord(letter)).linearHoriAdvance / 65536 for letter in text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_text_leaves_its_box_or_touches_another(variant: str) -> None:
    drawn = draw(variant)
    areas = []
    for text in all_texts(drawn):
        left, top, _, bottom = text.area
        right = left + measured(text.text, text.size, text.bold)
        areas.append((left, top, right, bottom, text.text))
        owner = drawn.placed.get(text.owner)
        assert right <= (owner.right if owner else 1000), text
        if owner:
            assert owner.x < left, text
            assert owner.y < top, text
            assert bottom < owner.bottom, text
    for a, b in itertools.combinations(areas, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a[4], b[4])


@pytest.mark.parametrize("variant", VARIANTS)
def test_boxes_and_chips_stand_apart_inside_the_drawing(variant: str) -> None:
    drawn = draw(variant)
    for cell in drawn.placed.values():
        assert cell.x > 0
        assert cell.right < 1000
        assert cell.bottom < drawn.height
    for a, b in itertools.combinations(drawn.placed.values(), 2):
        assert a.right < b.x or b.right < a.x or a.bottom < b.y or b.bottom < a.y, (a.id, b.id)


def segments(path: Path) -> list[tuple[float, float, float, float]]:
    """(left, top, right, bottom) of each."""
    return [
        (min(x, u), min(y, v), max(x, u), max(y, v)) for (x, y), (u, v) in itertools.pairwise(path.points)
    ]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_edge_is_orthogonal_and_passes_behind_no_box(variant: str) -> None:
    drawn = draw(variant)
    for path in drawn.paths:
        for left, top, right, bottom in segments(path):
            assert left == right or top == bottom, path
            for cell in drawn.placed.values():
                apart = right <= cell.x or cell.right <= left or bottom <= cell.y or cell.bottom <= top
                assert apart, (path, cell.id)


@pytest.mark.parametrize("variant", VARIANTS)
def test_edges_of_different_origin_never_share_a_line(variant: str) -> None:
    """They may cross. Edges with one source, or one target, may run together."""
    drawn = draw(variant)
    for one, two in itertools.combinations(drawn.paths, 2):
        if one.ends[0] == two.ends[0] or one.ends[1] == two.ends[1]:
            continue
        for a, b in itertools.product(segments(one), segments(two)):
            vertical = a[0] == a[2] == b[0] == b[2] and min(a[3], b[3]) > max(a[1], b[1])
            level = a[1] == a[3] == b[1] == b[3] and min(a[2], b[2]) > max(a[0], b[0])
            assert not vertical, (one, two)
            assert not level, (one, two)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_edge_touches_both_of_its_ends(variant: str) -> None:
    drawn = draw(variant)

    def touches(point: tuple[float, float], cell: Placed) -> bool:
        x, y = point
        beside = min(abs(x - cell.x), abs(x - cell.right)) < 1e-6 and cell.y <= y <= cell.bottom
        return beside or (min(abs(y - cell.y), abs(y - cell.bottom)) < 1e-6 and cell.x <= x <= cell.right)

    for path in drawn.paths:
        assert touches(path.points[0], drawn.placed[path.ends[0]]), path
        assert touches(path.points[-1], drawn.placed[path.ends[1]]), path


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_op_of_the_ledger_is_drawn_and_none_is_missing(variant: str) -> None:
    drawn = draw(variant)
    boxes = {(cell.op.column, cell.op.node) for cell in drawn.placed.values() if cell.op}
    assert boxes == set(drawn.observed.ops)
    assert drawn.missing == []


def without(records: list[dict[str, Any]], node: str, column: str) -> Observed:
    left = [record for record in records if (record["node"], record["column"]) != (node, column)]
    assert len(left) == len(records) - 1
    return Observed.from_records(left, 24, "moe", "dsv3", "nano")


@pytest.mark.parametrize(
    ("node", "column"),
    [
        ("kv_b.requant", "wgrad"), ("expert_down.requant_dy", "wgrad"), ("out.cast", "backward"), ("router", "backward"),
        ("requantize", "forward"), ("q_norm", "forward"), ("expert_down", "wgrad"),
    ],
)  # fmt: skip
def test_what_the_ledger_did_not_report_is_drawn_as_missing(node: str, column: str) -> None:
    drawn = arrange(without(records_of("dsv3"), node, column))
    assert f"{column[0]}:{node}" in drawn.missing
    text = render(drawn)
    assert "MISSING" in text
    assert "not reported" in text or ">missing<" in text


def test_dtypes_come_from_the_ledger_alone() -> None:
    """A run that carried x0 in fp32 and routed in bf16 is drawn so, whatever its recipe is called."""
    records = [
        record
        | ({"kept": [t | {"format": "fp32"} for t in record["kept"]]} if record["node"] == "attention_norm" else {})
        | ({"computes_in": "bf16"} if record["node"] == "router" and record["column"] == "forward" else {})
        for record in records_of("dsv3")
    ]
    drawn = arrange(Observed.from_records(records, 24, "moe", "dsv3", "nano"))
    assert "fp32" in [text.text for text in label(drawn, drawn.placed["f:x0"], False)[0]]
    assert [tag.text.text for tag in label(drawn, drawn.placed["f:router"], False)[1]] == ["bf16"]


def test_fused_casts_wear_a_second_tag() -> None:
    drawn = draw("dsv3")
    tags = {name: [tag.text.text for tag in label(drawn, drawn.placed[name], False)[1]] for name in drawn.placed}
    assert tags["f:attention_norm"] == ["⇒ e4m3", "bf16"]
    assert tags["b:rope"] == ["⇒ e4m3 +ᵀ", "bf16"]
    assert tags["f:attention"] == ["⇒ e5m6", "bf16"]
    assert tags["b:out.cast"] == tags["b:out"] == ["e4m3"]


def test_stashes_are_amber_where_an_op_reads_them_and_blue_where_only_a_wgrad_does() -> None:
    paths = {(path.kind, *path.ends) for path in draw("dsv3").paths if not path.dotted}
    assert ("amber", "f:x0", "b:attention_norm") in paths
    assert ("amber", "f:attn_cache", "b:attention") in paths
    assert ("blue", "f:attn_cache", "w:out.requant") in paths
    assert ("blue", "f:expert_h_cache", "w:expert_down.requant") in paths  # SwiGLU's output is made again from it
    assert ("orange", "b:dexpert_out", "w:expert_down.requant_dy") in paths
    kept = {(path.kind, *path.ends) for path in draw("SwiGLU output kept").paths if not path.dotted}
    assert ("blue", "f:expert_act", "w:expert_down.requant") in kept


def test_what_is_recomputed_has_a_dotted_edge() -> None:
    dotted = {path.ends for path in draw("recomputed").paths if path.dotted}
    assert ("f:y_q", "w:q_b.requant") in dotted
    assert not any(path.dotted for path in draw("dsv3").paths)


def test_the_svg_is_well_formed_and_names_sources() -> None:
    root = ElementTree.fromstring(render(draw("dsv3")))
    space = {"s": "http://www.w3.org/2000/svg"}
    words = {"".join(element.itertext()) for element in root.iterfind(".//s:text", space)}
    assert {"§3.3.1", "§3.3.3", "§3.2.3", "~"} <= words
    titles = [element.text or "" for element in root.iterfind(".//s:title", space)]
    assert len(titles) == len(draw("dsv3").placed)
    assert root.get("width") == "1000"


def test_every_box_names_its_source() -> None:
    for cell in draw("dsv3").placed.values():
        if isinstance(cell.cell, Box):
            assert cell.cell.source[0] in "§~s", cell.id


def test_bytes_kept_are_those_of_the_ledger() -> None:
    seen = observed("dsv3")
    kept = [t for r in records_of("dsv3") for t in r["kept"] if not t["again"]]
    assert seen.kept_bytes() * 24 == sum(t["bytes"] - t["padding"] for t in kept)

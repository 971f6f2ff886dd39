"""The report page and the trade-off plot: complete, safe, self-contained, and the same bytes every time."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from compress.report import plot_tradeoff, write_report
from compress.report.charts import PRINTED, bits_chart, error_chart, figure, quality_chart
from compress.report.facts import PARTS, gather, notes_text, part_of, split_layer_name
from compress.report.plots import comparison, label_axes
from runtime.errors import ArtifactError, RequestError

ROOT = Path(__file__).resolve().parents[3]
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balanced(HTMLParser):
    """Collects tags, attributes and text; fails on a tag that is closed out of order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.words, self.ids, self.by = [], [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        self.by += [value for name, value in attrs if name == "data-by"]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parse(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture
def artifact(tiny_artifact, tmp_path):
    return shutil.copytree(tiny_artifact, tmp_path / "artifact")


def edit(artifact, **changes):
    path = artifact / "compress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestPage:
    def test_apply_wrote_it_and_report_writes_the_same(self, tiny_artifact, artifact):
        before = (tiny_artifact / "report.html").read_bytes()
        (artifact / "report.html").unlink()
        assert write_report(artifact) == artifact / "report.html"
        assert (artifact / "report.html").read_bytes() == before

    def test_says_what_matters(self, artifact):
        manifest = json.loads((artifact / "compress.json").read_text())
        page = parse(write_report(artifact).read_text(encoding="utf-8"))
        text = " ".join(page.words)
        metrics = manifest["metrics"]
        for expected in (
            "tiny_w4", f"{metrics['before']['perplexity']:.5g}", f"{metrics['after']['perplexity']:.5g}", f"{metrics['kl']:.5g}",
            f"{metrics['top1_agreement']:.2%}", "kept", manifest["toolchain"]["torch"], manifest["source"]["fingerprint"],
            "group_size: 32", *(layer["name"] for layer in manifest["layers"]), *(f"{x['error']:.3%}" for x in manifest["layers"]),
        ):  # fmt: skip
            assert expected in text, expected
        assert page.tags.count("svg") == 3

    def test_shows_the_run_and_its_samples(self, artifact):
        samples = {"prompts": ["Once"], "tokens": 48, "source": [" upon\n"], "artifact": ["\n<i>a"], "left_out": {}}
        record = json.loads((artifact / "run.json").read_text()) | {"samples": samples}
        (run,) = record["runs"]
        run |= {
            "command": "compress apply 'my recipe'",
            "seconds": {"prepare": 1.5, "compress": 62.0},
            "peak_memory": 2_000_000,
        }
        run["machine"] |= {"cpu": "A CPU <1>", "gpus": ["A GPU"]}
        (artifact / "run.json").write_text(
            json.dumps({**record, "runs": [run, run | {"date": "2026-01-02", "command": None}]})
        )
        text = write_report(artifact).read_text(encoding="utf-8")
        words = parse(text).words
        for expected in (
            "compress apply 'my recipe'", "called from Python", "A CPU <1>", "A GPU", "1 min 02 s", "1 min 04 s", "2.00 MB", "2026-01-02",
            run["date"],
        ):  # fmt: skip
            assert expected in words, expected
        assert "<pre>\n upon\n</pre>" in text
        assert "<pre>\n\n&lt;i&gt;a</pre>" in text, "a browser drops the first newline of a <pre>"
        samples |= {"source": None, "left_out": {"source": "too large"}}
        (artifact / "run.json").write_text(json.dumps(record))
        assert "The source was left out: too large" in parse(write_report(artifact).read_text(encoding="utf-8")).words

    def test_without_a_run_record(self, artifact):
        (artifact / "run.json").unlink()
        words = parse(write_report(artifact).read_text(encoding="utf-8")).words
        assert "How it was made" not in words
        assert "Layers" in words

    @pytest.mark.parametrize("content", ["[]", "{", '{"runs": [1]}', '{"runs": 3}', '{"samples": {"prompts": ["a"]}}'])
    def test_a_record_that_cannot_be_shown(self, artifact, content):
        (artifact / "run.json").write_text(content)
        with pytest.raises(ArtifactError):
            write_report(artifact)

    def test_names_texts_readers_and_all_that_is_loaded(self, artifact):
        manifest = json.loads((artifact / "compress.json").read_text())
        readers = [{"name": "vLLM", "how": "after export", "note": "target x"}]
        sizes = {"draft": 7_900_000, "cache_files": 1_000, "tokenizer": 2_000, "total": 9_000_000}
        texts = {"evaluation": {"description": "my stories"}, "calibration": {"description": "more of them"}}
        edit(artifact, **texts, readable_by=readers, bytes=manifest["bytes"] | sizes)
        words = parse(write_report(artifact).read_text(encoding="utf-8")).words
        assert sum("on my stories" in word for word in words) >= 3, "both numbers of the headline, and the note"
        assert sum("more of them" in word for word in words) >= 2, "the errors of layers, and the origin"
        for expected in ("vLLM", "after export", "target x", "7.90 MB", "calibrated cache files", "9.00 MB"):
            assert expected in words, expected

    def test_layers_sort_by_numbers(self, artifact):
        edit(artifact, layers=[layer | {"error": None} for layer in gather(artifact).layers[:1]])
        page = parse(write_report(artifact).read_text(encoding="utf-8"))
        (layer,) = gather(artifact).layers
        numbers = [layer["bits"], layer["sparsity"], layer["bytes_before"], layer["bytes_after"]]
        assert page.by[:5] == ["", *(repr(float(number)) for number in numbers)]

    def test_stands_alone(self, artifact):
        text = write_report(artifact).read_text(encoding="utf-8")
        page = parse(text)
        assert all(link.startswith("#") for link in page.links)
        assert {"link", "img", "iframe"}.isdisjoint(page.tags)
        assert page.tags.count("script") == 1  # inline: there are no links; tables stay readable without it
        assert {"fetch", "XMLHttpRequest", "import", "innerHTML", "eval"}.isdisjoint(
            re.findall(r"\w+", text.split("<script>")[1])
        )
        assert re.search(r"url\((?!#)|@import|https?:", text) is None
        assert len(page.ids) == len(set(page.ids))
        assert all(link.removeprefix("#") in page.ids for link in page.links)
        assert "prefers-color-scheme: dark" in text

    def test_hostile_names_are_text(self, artifact):
        manifest = json.loads((artifact / "compress.json").read_text())
        evil = "<script>alert('x')</script>\"&"
        for layer in manifest["layers"]:
            layer |= {"method": evil, "notes": {evil: evil}, "name": f"{layer['name']}{evil}"}
        manifest["source"]["path_or_id"] = manifest["toolchain"]["torch"] = manifest["toolchain"][evil] = evil
        edit(artifact, **(manifest | {"warnings": [evil]}))
        (artifact / "recipe.yaml").write_text(f"name: {evil}\n</pre>{evil}\n")
        page = parse(write_report(artifact).read_text(encoding="utf-8"))
        assert page.tags.count("script") == 1  # the page's own
        assert evil in page.words  # shown, as the text it is

    def test_without_evaluation(self, artifact):
        edit(artifact, metrics={})
        page = parse(write_report(artifact).read_text(encoding="utf-8"))
        assert "Quality was not evaluated" in " ".join(page.words)
        assert page.tags.count("svg") == 2

    def test_warnings_are_told(self, artifact):
        manifest = json.loads((artifact / "compress.json").read_text())
        manifest["metrics"]["limits"] = [{"name": "max_kl", "limit": 0.01, "value": 0.5, "ok": False}]
        manifest["layers"][0]["notes"] = {"retries": 2, "damping": 0.08}
        edit(artifact, **manifest)
        text = " ".join(parse(write_report(artifact).read_text(encoding="utf-8")).words)
        assert "max_kl is 0.5; the limit is 0.01" in text
        assert f"{manifest['layers'][0]['name']}: the Hessian needed more damping" in text
        assert "exceeded" in text

    def test_bytes_add_up(self, artifact):
        facts = gather(artifact)
        assert sum(facts.before.values()) == facts.bytes_before
        assert sum(facts.after.values()) == facts.bytes_after
        assert facts.after["scales and indices"] > 0
        assert facts.after["mlp"] < facts.before["mlp"] / 3.9

    def test_other_file(self, artifact, tmp_path):
        assert write_report(artifact, tmp_path / "new" / "page.html").is_file()
        (tmp_path / "file").write_text("")
        with pytest.raises(RequestError, match=r"page\.html"):
            write_report(artifact, tmp_path / "file" / "page.html")

    def test_plain_checkpoint_has_nothing_to_report(self, tiny_llama):
        with pytest.raises(ArtifactError, match=r"compress\.json"):
            write_report(tiny_llama())


class TestFacts:
    @pytest.mark.parametrize(
        ("name", "part"),
        [
            ("model.embed_tokens.weight", "embeddings"),
            ("transformer.wte.weight", "embeddings"),
            ("transformer.wpe.weight", "embeddings"),
            ("model.layers.0.self_attn.q_proj.weight", "attention"),
            ("transformer.h.3.attn.c_attn.weight", "attention"),
            ("model.layers.0.self_attn.q_norm.weight", "norms"),
            ("transformer.h.3.ln_1.bias", "norms"),
            ("transformer.ln_f.weight", "norms"),
            ("model.layers.9.post_attention_layernorm.weight", "norms"),
            ("model.layers.0.mlp.down_proj.weight", "mlp"),
            ("model.layers.0.mlp.experts.gate_up_proj", "mlp"),
            ("model.decoder.layers.0.fc1.weight", "mlp"),
            ("lm_head.weight", "output head"),
            ("model.something_else", "other"),
        ],
    )
    def test_part_of(self, name, part):
        assert part_of(name) == part
        assert part in PARTS

    def test_split_layer_name(self):
        assert split_layer_name("model.layers.13.self_attn.q_proj") == (13, "q_proj")
        assert split_layer_name("h.2.mlp.c_fc") == (2, "c_fc")
        assert split_layer_name("lm_head") == (-1, "lm_head")

    def test_notes_leave_out_what_did_not_happen(self):
        notes = {"damping": 0.01, "retries": 0, "dead_columns": 3, "sparsity": 0.5, "folded": True}
        assert notes_text(notes) == "damping 0.01, dead columns 3, folded yes"


class TestCharts:
    def layers(self, blocks):
        names = ("self_attn.q_proj", "mlp.down_proj")
        return [{"name": f"model.layers.{b}.{n}", "error": 0.01 * (b + 1)} for b in range(blocks) for n in names]

    @pytest.mark.parametrize("blocks", [1, 2, 32, 200])
    def test_every_kind_is_in_the_legend(self, blocks):
        chart = error_chart([*self.layers(blocks), {"name": "lm_head", "error": 0.5}])
        words = " ".join(parse(chart).words)
        assert "q_proj" in words
        assert "down_proj" in words
        assert "lm_head" in words
        assert "outside" in words or blocks == 200

    @pytest.mark.parametrize("blocks", [2, 32, 200])
    def test_ticks_do_not_overlap(self, blocks):
        """Ticks of the x axis, as wide as the fonts of most pages make them."""
        chart = error_chart([*self.layers(blocks), {"name": "lm_head", "error": 0.5}])
        ticks = re.findall(r'id="error-xtick_\d+".*?<text[^>]* x="([\d.]+)"[^>]*>(\w+)<', chart, re.DOTALL)
        assert len(ticks) >= min(blocks, 10)
        for (at, word), (after, other) in pairwise(sorted((float(at), word) for at, word in ticks)):
            assert at + 7 * (len(word) + len(other)) / 2 < after, (word, other)

    def test_an_axis_begins_where_the_data_does(self):
        """With points: a bar would be as long as the axis pleases."""
        for chart in (
            error_chart(self.layers(4)),
            bits_chart([x | {"bits": 4.1 + x["error"]} for x in self.layers(4)]),
        ):
            assert "line2d" in chart
            assert "0%" not in parse(chart).words
        words = parse(quality_chart(14.05, 14.29)).words
        assert {"14.05", "14.29", "14"} <= set(map(str.strip, words))
        assert not {"0", "0.0"} & set(map(str.strip, words))

    def test_long_names_stay_apart(self):
        names = [f"attn.a_rather_long_name_number_{n}_of_the_family" for n in range(23)]
        words = " ".join(parse(error_chart([{"name": f"h.0.{name}", "error": 0.1} for name in names])).words)
        assert words.count("_of_the_family") == 23
        assert "number" not in words

    def test_nothing_to_draw(self):
        assert error_chart([]) == ""
        assert quality_chart(3.0, float("inf")) == ""

    def test_all_errors_zero(self):
        assert "<svg" in error_chart([{"name": "model.layers.0.mlp.up_proj", "error": 0.0}])

    def test_colours_come_from_the_page(self):
        chart = error_chart(self.layers(4))
        assert "currentColor" in chart
        assert "var(--line)" in chart
        assert "#010203" not in chart


class TestTradeoff:
    ROWS = (
        {"method": "bf16", "bytes": 8e6, "perplexity": 15.0, "reference": True},
        {"method": "rtn", "bytes": 3e6, "perplexity": 22.0, "label": "W3"},
        {"method": "gptq", "bytes": 3e6, "perplexity": 17.0, "label": "W3"},
        {"method": "gptq", "bytes": 4e6, "perplexity": 15.5, "label": "W4"},
    )

    def test_the_same_bytes_every_time(self, tmp_path):
        first, second = (plot_tradeoff(self.ROWS, tmp_path / name / "plot") for name in ("a", "b"))
        assert [path.name for path in first] == ["plot.svg", "plot.png"]
        for one, other in zip(first, second, strict=True):
            assert one.read_bytes() == other.read_bytes()
        words = " ".join(parse(first[0].read_text()[first[0].read_text().index("<svg") :]).words)
        for label in ("rtn", "gptq", "W4", "bf16"):
            assert label in words

    @pytest.mark.parametrize(
        ("rows", "name", "message"),
        [
            (ROWS[:1], "p.svg", "points"),
            (ROWS, "p.jpeg", r"\.svg, \.png, \.pdf"),
            ((*ROWS, {"method": "x", "bytes": 1, "perplexity": float("nan")}), "p.svg", "perplexity of 'x'"),
            ((*ROWS, {"method": "x", "bytes": None, "perplexity": 1.0}), "p.svg", "bytes of 'x'"),
        ],
    )
    def test_wrong_requests(self, rows, name, message, tmp_path):
        with pytest.raises(RequestError, match=message):
            plot_tradeoff(rows, tmp_path / name)
        assert list(tmp_path.iterdir()) == []

    def test_comparison_of_artifacts(self, tiny_artifact, artifact):
        rows = comparison([tiny_artifact, artifact])
        assert [row["label"] for row in rows] == ["uncompressed", "tiny_w4", "artifact"]
        assert rows[0]["bytes"] > rows[1]["bytes"] == rows[2]["bytes"]
        assert rows[1]["perplexity"] == gather(artifact).metrics["after"]["perplexity"]

    def test_what_cannot_be_compared_is_refused(self, tiny_artifact, artifact):
        manifest = json.loads((artifact / "compress.json").read_text())
        edit(artifact, source=manifest["source"] | {"fingerprint": "0" * 64})
        with pytest.raises(RequestError, match="models"):
            comparison([tiny_artifact, artifact])
        manifest["metrics"]["tokens"] += 1
        edit(artifact, **manifest)
        with pytest.raises(RequestError, match="text"):
            comparison([tiny_artifact, artifact])


class TestPictures:
    @pytest.mark.parametrize("points", [1, 6, 14])
    def test_labels_cover_neither_each_other_nor_the_legend(self, points):
        with figure(8.0, 4.6, *PRINTED) as (_, axes):
            at = [(1 + 0.3 * number, 3 + 0.05 * (-1) ** number) for number in range(points)]
            axes.step(*zip(*at, strict=True), where="post", marker="o", label="measured")
            axes.axhline(3.02, label="whole")
            label_axes(
                axes, "x", "y", "#eeeeee", [(x, y, f"method {number}", "black") for number, (x, y) in enumerate(at)]
            )
            boxes = [text.get_window_extent() for text in axes.texts] + [axes.get_legend().get_window_extent()]
            assert len(boxes) == points + 1
            for number, one in enumerate(boxes):
                assert not any(one.overlaps(other) for other in boxes[:number])

    @pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.stem)
    def test_letters_of_the_docs_are_legible_in_1400_pixels(self, picture):
        text = picture.read_text(encoding="utf-8")
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', text).group(1))
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )?([\d.]+)px", text)]
        assert sizes
        assert min(sizes) * 1400 / width >= 12

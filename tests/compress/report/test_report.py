"""The report page and the trade-off plot: complete, safe, self-contained, and the same bytes every time."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from compress.report import plot_tradeoff, write_report
from compress.report.charts import error_chart, quality_chart
from compress.report.facts import PARTS, gather, notes_text, part_of, split_layer_name
from compress.report.plots import comparison
from runtime.errors import ArtifactError, RequestError

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balanced(HTMLParser):
    """Collects tags, attributes and text; fails on a tag that is closed out of order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.words, self.ids = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
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

    def test_stands_alone(self, artifact):
        text = write_report(artifact).read_text(encoding="utf-8")
        page = parse(text)
        assert all(link.startswith("#") for link in page.links)
        assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
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
        assert "script" not in page.tags
        assert evil in page.words  # shown, as the text it is

    def test_without_evaluation(self, artifact):
        edit(artifact, metrics={})
        page = parse(write_report(artifact).read_text(encoding="utf-8"))
        assert "no evaluation" in " ".join(page.words)
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

    @pytest.mark.parametrize("blocks", [1, 4, 60])
    def test_every_kind_is_in_the_legend(self, blocks):
        chart = error_chart([*self.layers(blocks), {"name": "lm_head", "error": 0.5}])
        words = " ".join(parse(chart).words)
        assert "q_proj" in words
        assert "down_proj" in words
        assert "lm_head" in words
        assert "outside" in words or blocks == 60

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

"""Examples of the README, CONTRIBUTING and docs: command lines parse, recipes validate, marked blocks run on the bundled checkpoint.

A fenced block after the comment `<!-- example: run -->` is run, the blocks of a page in one directory and one namespace. Python blocks
without it must at least parse.
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import compress
from compress.cli import COMMANDS, build, main
from compress.recipe import load
from compress.sweeps.reading import load_sweep

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"(?:^ *<!-- example: (?P<mark>\w+) -->\n)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```",
    re.M | re.S,
)
#: `compress COMMAND ...`, or the same through a launcher.
COMMAND = re.compile(rf"(?:^|\s)(?:\S*/)?(?:compress|-m compress(?:\.cli)?) (?=(?:{'|'.join(COMMANDS)})\b)")
#: What every run of `apply` is given, so that it takes seconds.
FEW = (
    "calibration.samples=4", "calibration.sequence_length=64", "evaluate.samples=2", "evaluate.sequence_length=64",
    "evaluate.max_perplexity_increase=1000%", "evaluate.max_kl=none", "evaluate.min_agreement=none",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    mark: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            found["mark"],
            textwrap.dedent(found["text"]),
        )
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def in_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def command_lines(text: str) -> Iterator[list[str]]:
    """Arguments of each `compress` line, without comments, pipes and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        found = COMMAND.search(line)
        if found is None or line.lstrip().startswith("#"):
            continue
        words = shlex.split(line[found.end() :].replace("$'", "'"), comments=True)
        stops = [i for i, word in enumerate(words) if word in ("|", ">", "<", "&&", ";", "\\")]
        yield words[: min(stops, default=len(words))]


def parse_line(arguments: Iterable[str]) -> None:
    """Parse as the command line does, without running anything; typer's error otherwise."""
    rest, command = list(arguments), typer.main.get_command(build())
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]  # type: ignore[attr-defined]
    command.make_context("compress", rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_parse(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = [(block.text, True) for block in blocks_of(page) if block.language in ("bash", "console", "sh")]
    # In prose a command may be named without its arguments.
    shown += [(span, False) for span in re.findall(r"`([^`\n]+)`", text) if COMMAND.match(span)]
    for part, whole in shown:
        for arguments in command_lines(part):
            try:
                parse_line(arguments)
            except Exception as error:
                if type(error).__name__ == "MissingParameter" and not whole:
                    continue
                message = error.format_message() if hasattr(error, "format_message") else str(error)
                pytest.fail(f"{page.name}: compress {shlex.join(arguments)}: {message}")


def test_a_wrong_command_line_is_found() -> None:
    for line in ("compress apply", "compress apply a --no-such-option", "compress eval a --samples few"):
        with pytest.raises(Exception, match=r"."):
            parse_line(next(command_lines(line)))


@pytest.mark.parametrize("block", in_language("yaml"), ids=str)
def test_yaml_validates(block: Block) -> None:
    data = yaml.safe_load(block.text)
    if data.keys() & {"vary", "ray"}:
        base = {"name": "docs", "recipe": "llama_w4", "vary": {"stages.0.quantize.bits": [3, 4]}}
        load_sweep({**base, **data})
        return
    base = {"name": "docs", "model": "checkpoints/stdlib-4m", "stages": [{"quantize": {"method": "rtn"}}]}
    if "kv_cache" in data:
        data = {"stages": [*base["stages"], {"kv_cache": data["kv_cache"]}]}
    load({**base, **data})


def test_there_are_examples() -> None:
    assert len(in_language("yaml")) >= 10
    assert sum(block.mark == "run" for block in BLOCKS) >= 5


@pytest.mark.parametrize("block", in_language("python"), ids=str)
def test_python_parses(block: Block) -> None:
    ast.parse(block.text)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `out/llama_w4`, a quick artifact of the bundled checkpoint."""
    path = tmp_path_factory.mktemp("docs")
    compress.apply("llama_w4", output=path / "out" / "llama_w4", set=[*FEW, "stages.0.quantize.method=rtn"], quiet=True)
    return path


def few(given: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """The caller's changes, checked by being applied first, then those that make a run quick."""
    listed = [f"{key}={value}" for key, value in given.items()] if isinstance(given, Mapping) else list(given)
    return [*listed, *FEW]


RUN = [page for page in PAGES if any(block.mark == "run" for block in blocks_of(page))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    apply, plan = compress.apply, compress.plan
    monkeypatch.setattr(compress, "apply", lambda *a, set=(), **k: apply(*a, set=few(set), overwrite=True, **k))
    monkeypatch.setattr(compress, "plan", lambda *a, set=(), **k: plan(*a, set=few(set), **k))
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        if block.mark != "run":
            continue
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
            continue
        for arguments in command_lines(block.text):
            quick = [part for change in FEW for part in ("--set", change)] if arguments[0] in ("apply", "plan") else []
            again = ["--overwrite"] if arguments[0] == "apply" else []
            code = main([*arguments, *quick, *again])
            assert code == 0, f"{block}: compress {shlex.join(arguments)}: {capsys.readouterr().err}"


def test_relative_links_lead_somewhere() -> None:
    """Links of pages that GitHub shows; those of the site are checked by `mkdocs build --strict`."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_extension_examples_are_as_long_as_said() -> None:
    told = dict(re.findall(r"\| `(\w+\.py)`:[^|]*\| (\d+) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    files = sorted((ROOT / "tests" / "extension" / "src" / "compress_extension").glob("[!_]*.py"))
    assert files
    for file in files:
        lines = len(file.read_text(encoding="utf-8").splitlines())
        assert abs(lines - int(told[file.name])) <= 15, (
            f"{file.name} has {lines} lines, CONTRIBUTING.md says {told[file.name]}"
        )


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200

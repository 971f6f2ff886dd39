"""Command `compress generate`: generates text from a prompt, or transcribes a sound."""

from __future__ import annotations

import sys
from typing import Any

import typer

from compress.commands.options import JSON, PATH, with_generation_options
from compress.commands.output import finish, stdout_reserved
from runtime.errors import RequestError


@with_generation_options
def generate(
    model: str = PATH,
    prompt: str = typer.Argument(..., metavar="PROMPT", help="The prompt, - for stdin, or a .wav file (speech)."),
    chat: bool = typer.Option(False, "--chat", help="Send the prompt as a message, through the model's chat template."),
    sampling: Any = None,
    language: str | None = typer.Option(None, "--language", help="Speech models: language of the audio, such as en."),
    task: str | None = typer.Option(None, "--task", help="Speech models: transcribe or translate."),
    stream: bool = typer.Option(False, "--stream", help="Print the text as it is generated."),
    loading: Any = None,
    as_json: bool = JSON,
) -> None:
    """Generate text from a prompt. Only the new text goes to stdout; the speed goes to stderr.

    \b
    Examples:
      compress generate out/llama_w4_sparse "def read_lines(path):"
      compress generate out/my-w4 "Once upon a time" --stream --temperature 0.8 --top-p 0.95 --seed 1
      compress generate out/my-w4 "Name three rivers." --chat
      compress generate out/my-w4 - --kv-cache '{"method": "snapkv", "keys": "int4", "values": "int4"}' < long.txt
      compress generate out/whisper-w4 talk.wav --language en
      cat prompt.txt | compress generate out/my-w4 - -n 64 --stop $'\\n\\n'
    """
    if stream and as_json:
        raise RequestError("--stream prints text as it is generated, --json one object at the end; use one of them")
    if prompt == "-":
        prompt = sys.stdin.read()
    options: dict[str, Any] = dict(sampling)
    options |= {name: value for name, value in (("language", language), ("task", task)) if value is not None}
    given: Any = [{"role": "user", "content": prompt}] if chat else prompt
    with stdout_reserved(as_json):
        import runtime

        loaded = runtime.load(model, **loading)
        if not hasattr(loaded, "generate"):
            raise RequestError(f"{model} holds a {type(loaded).__name__}, which makes embeddings, not text")
        for option, asked, can in (
            ("--stream", stream, "does not stream"),
            ("--chat", chat, "takes no conversation"),
        ):
            if asked and not isinstance(loaded, runtime.Model):
                raise RequestError(f"{model} holds a {type(loaded).__name__}, which {can}: leave out {option}")
        if stream:
            for part in loaded.stream(given, **options):
                print(part, end="", flush=True)
            text = ""
        else:
            text = loaded.generate(given, **options)
    finish({"model": model, "prompt": prompt, "text": text, "stats": loaded.stats}, as_json, _show)


def _show(result: dict[str, Any]) -> None:
    print(result["text"])  # empty after --stream
    stats = result["stats"]
    text = (
        f"{stats['new_tokens']} tokens, {stats['tokens_per_second']:.1f} per second; "
        f"prompt of {stats['prompt_tokens']} tokens read in {stats['prefill_seconds']:.2f} s"
    )
    if stats.get("drafted_tokens"):
        text += f"; {stats['drafted_tokens']} tokens drafted ({stats['drafter']}), {stats['accepted_tokens']} of them accepted"
    print(text, file=sys.stderr)

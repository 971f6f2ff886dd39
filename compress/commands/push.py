"""Command `compress push`: publishes an artifact or an export on the Hugging Face hub."""

from __future__ import annotations

import sys
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from compress.commands.options import JSON
from compress.commands.output import counted, finish, stdout_reserved
from compress.core.units import size
from runtime.config.messages import listing
from runtime.errors import CompressError, RequestError, first_line

if TYPE_CHECKING:
    from runtime.checkpoint.artifact import Artifact
    from runtime.checkpoint.export_directory import Export


def push(
    artifact: Path = typer.Argument(..., help="Directory of an artifact or an export."),
    repo: str = typer.Argument(..., help="Repository on the hub, NAME or ORG/NAME; created if it does not exist."),
    private: bool = typer.Option(False, "--private", help="Create the repository as private."),
    revision: str | None = typer.Option(
        None, "--revision", help="Branch to push to (default: main); created if it does not exist."
    ),
    commit_message: str | None = typer.Option(None, "--commit-message", help="Commit message."),
    as_json: bool = JSON,
) -> None:
    """Publish an artifact or an export on the Hugging Face hub, with its model card.

    Every file is checked against its SHA-256 first.
    Uploads the files of the manifest, README.md and report.html; logs and other files are not uploaded.
    Log in first with `hf auth login`, or set HF_TOKEN.

    \b
    Examples:
      compress push out/qwen3-w4 me/qwen3-w4
      compress push out/qwen3-w4-gguf me/qwen3-w4-gguf --private
    """
    with stdout_reserved(as_json):
        files = publishable(artifact)
        result = _upload(artifact, sorted(files), repo, private, revision, commit_message)
    result["bytes"] = sum((artifact / name).stat().st_size for name in files)
    finish({"artifact": str(artifact), **result}, as_json, _show)


def publishable(path: Path) -> set[str]:
    """Names of the files that are uploaded for an artifact or export, each checked against its hash.

    Raises:
        RequestError: neither an artifact nor an export, or an unfinished run. CompressError: a file is missing or differs.
    """
    from compress.report.card import write_card
    from runtime.api.load import refuse_unfinished
    from runtime.checkpoint.artifact import MANIFEST, REPORT, Artifact
    from runtime.checkpoint.export_directory import MANIFEST as EXPORT
    from runtime.checkpoint.export_directory import README, find_export
    from runtime.checkpoint.locate import leads_out

    refuse_unfinished(path)
    export = find_export(path)
    opened = Artifact(path) if export is None or export.is_checkpoint else None
    manifest = None if opened is None else opened.manifest
    if export is None and manifest is None:
        raise RequestError(f"{path} is a checkpoint that compress did not write; publish it with `hf upload`")
    try:
        _verify(opened, export)
    except RequestError as error:  # the request is fine, the files are damaged
        raise CompressError(str(error)) from None
    names = (
        {README}
        | set(export.manifest["files"] if export is not None else ())
        | ({EXPORT} if export is not None else set())
    )
    if manifest is not None:
        names |= {*manifest["files"], MANIFEST, REPORT}
        if not (path / README).is_file():
            write_card(path)
        if places := _places(path, manifest):
            print(
                f"compress: note: {MANIFEST}, recipe.yaml or {REPORT} contain local paths: {listing(places, 4)}",
                file=sys.stderr,
            )
    for name in sorted(names):
        if leads_out(path / name, path):  # the card, which no hash binds, could be any file of this machine
            raise RequestError(f"{path / name} is a link that leads out of the directory: put the file itself there")
    return {name for name in names if (path / name).is_file()}


def _places(path: Path, manifest: dict[str, Any]) -> list[str]:
    """Local paths that a reader of the published files sees: of the manifest, of the recipe, and of the commands in the report."""
    import yaml

    from compress.core.files import read_object
    from compress.core.run_directory import RECORD
    from compress.report.card import local_paths

    recipe, record = path / "recipe.yaml", path / RECORD
    published: list[Any] = [{key: value for key, value in manifest.items() if key != "files"}]
    if recipe.is_file():
        published.append(yaml.safe_load(recipe.read_text(encoding="utf-8")))
    if record.is_file():
        published.append(read_object(record, "remove it").get("runs"))
    return sorted({place for each in published for place in local_paths(each)})


def _verify(opened: Artifact | None, export: Export | None) -> None:
    from runtime.checkpoint.export_directory import verify_files

    if opened is not None:
        verify_files(opened, export, readme=False)
    elif export is not None:
        export.verify(readme=False)


def _upload(
    path: Path, files: list[str], repo: str, private: bool, revision: str | None, message: str | None
) -> dict[str, Any]:
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise RequestError(f"{repo!r} is not a repository name (NAME or ORG/NAME): {first_line(error)}") from None
    if revision is not None and not revision.strip():
        raise RequestError("--revision: the name is empty; leave the option out for main")
    if get_token() is None:
        raise RequestError("not logged in to the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")
    api = HfApi(library_name="compress")
    try:
        name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(name).private:  # it was there already, and stays as it is
            raise RequestError(f"{name} exists and is public: leave out --private, or make it private on the hub first")
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=path, revision=revision, allow_patterns=[escape(file) for file in files],
            commit_message=message or f"Upload {path.resolve().name} with compress",
        )  # fmt: skip
    except RequestError:
        raise
    except Exception as error:  # the client raises its own, httpx' and OS errors
        raise CompressError(_sentence(error, repo)) from error
    url = f"{api.endpoint}/{name}" + (f"/tree/{revision}" if revision is not None else "")
    return {"repo": name, "url": url, "commit": done.oid, "files": files}


def _sentence(error: Exception, repo: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return f"{repo} was not published: HF_HUB_OFFLINE is set; unset it to reach the Hugging Face hub"
    if isinstance(error, ValueError):  # from the check of the card's metadata, on several lines
        return f"{repo} was not published: {' '.join(str(error).split())}"
    if not isinstance(error, HfHubHTTPError):
        return f"{repo} was not published: the Hugging Face hub cannot be reached ({type(error).__name__}: {first_line(error)})"
    status, said = error.response.status_code, error.server_message or first_line(error)
    reasons = {
        401: "the hub does not accept this login: run `hf auth login` again, or set HF_TOKEN to a token with write access",
        403: f"this login may not write to it ({said}); use a token with write access, or another repository",
        404: "there is no repository of that name that this login may write to",
    }
    return f"{repo} was not published: {reasons.get(status, f'the hub answered {status} ({said}); try again later')}"


def _show(result: dict[str, Any]) -> None:
    print(f"{counted(len(result['files']), 'file')}, {size(result['bytes'])} pushed to {result['url']}")

"""Uploads an exported model or adapter to Hugging Face or ModelScope, by the hub's own library."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from toolkit.config import files
from toolkit.messages import CheckpointError, ConfigError, ModelError, tr
from toolkit.report.run import Run, is_run, read_run
from toolkit.report.scores import tables_of
from toolkit.secrets import hide

CARD = "README.md"
_HUB = re.compile(r"(?:(hf|modelscope):)?([\w.-]+/[\w.-]+)", re.ASCII)
_REFUSED = (401, 403)
_TOKENS = {"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}
"""Variables that hold a token, where `hf auth login` or `modelscope login` has not saved one."""


class Target(NamedTuple):
    """A repository on a hub."""

    hub: str
    """hf or modelscope."""
    repository: str
    """owner/name."""


def parse_target(text: str) -> Target:
    """Return the repository that `hub=` names: owner/name on Hugging Face, or hf:… or modelscope:…."""
    if not (match := _HUB.fullmatch(text)):
        raise ConfigError("hub = {value} is no repository: write owner/name or modelscope:owner/name.", value=text)
    return Target(match[1] or "hf", match[2])


def exported_folder(path: Path) -> Path:
    """Return the directory to upload: a run's export, or `path` itself if it holds a model or an adapter; ModelError if
    there is no exported model.
    """
    files.check_directory(path, ModelError)
    folder = path / "export" if (path / "config.yaml").is_file() else path
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ModelError(
            "{folder} holds no exported model or adapter. For a checkpoint: toolkit export-model PATH output=DIR",
            folder=folder,
        )
    return folder


def uploaded_files(folder: Path) -> list[Path]:
    """Return a directory's regular files, which are uploaded; ModelError for links, which may lead anywhere."""
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    if links := [path for path in paths if path.is_symlink()]:
        raise ModelError("{file} is a link, which is not uploaded. Put a copy in its place.", file=links[0])
    # The hubs' libraries keep notes about downloads and uploads in .cache.
    return [path for path in paths if ".cache" not in path.relative_to(folder).parts]


def card_with_license(card: str, license_id: str) -> str:
    """Return a model card whose front matter (the YAML between two lines of ---) names a licence, in place of one that
    it has.
    """
    if not card.startswith("---\n"):
        return f"---\nlicense: {license_id}\n---\n\n{card}"
    front, end, text = card.removeprefix("---\n").partition("\n---\n")
    lines = [line for line in front.splitlines() if not line.startswith("license:")]
    return "\n".join(["---", f"license: {license_id}", *lines]) + end + text


def run_of(folder: Path) -> Run | None:
    """Return the run that a directory is the export of; None for any other directory."""
    folder = folder.absolute()
    return read_run(folder.parent) if folder.name == "export" and is_run(folder.parent) else None


def scores_section(run: Run) -> str:
    """Return a run's scores (`toolkit eval`) as Markdown with a heading, the newest first; "" if it has none."""
    lines = []
    for title, heads, rows in tables_of([run]):
        table = [heads, ["---"] * len(heads), *rows]
        lines += [
            f"### {title}",
            "",
            *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table),
            "",
        ]
    return "\n".join([f"## {tr('Scores of `toolkit eval`')}", "", *lines]) if lines else ""


def base_license(run: Run) -> str:
    """Return the licence that the card of a run's base model names; "" if it names none, or is not in a directory."""
    path = run.section("model").get("path")
    card = Path(path) / CARD if isinstance(path, str) and path else None
    if card is None or not card.is_file():
        return ""
    text = card.read_text(encoding="utf-8", errors="replace")
    front = text.removeprefix("---\n").partition("\n---\n")[0] if text.startswith("---\n") else ""
    named = re.search(r"^license: *['\"]?([A-Za-z0-9.-]+)['\"]? *$", front, re.MULTILINE)
    return named[1] if named else ""


def changed_card(folder: Path, license_id: str, scores: str) -> bytes | None:
    """Return the model card with a licence and a section of scores, each "" for none; None if they change nothing."""
    card = folder / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    changed = card_with_license(text, license_id) if license_id else text
    if scores:
        changed = f"{changed.rstrip()}\n\n{scores}"
    return None if changed == text else changed.encode()


def upload(target: Target, folder: Path, *, private: bool, license_id: str, scores: str = "") -> str:
    """Upload a directory's files in one commit, and return the repository's address. Large files that have arrived are
    not sent again by a further call.

    Args:
        target: the repository.
        folder: the directory.
        private: whether the repository, if it is created, is not public.
        license_id: put into the model card that is uploaded; "" leaves it as it is.
        scores: a section that is added to this card; see `scores_section`.

    Raises:
        ConfigError: the hub's library or a token is missing, or the hub rejects the token.
        CheckpointError: the connection or the hub fails.
    """
    names = [str(path.relative_to(folder)) for path in uploaded_files(folder)]
    card = changed_card(folder, license_id, scores)
    with _library_errors_translated(target):
        return _SENDERS[target.hub](target.repository, folder, names, card, private)


def _to_hugging_face(repository: str, folder: Path, names: Sequence[str], card: bytes | None, private: bool) -> str:
    """Upload files `names` of a directory, and the content of a changed `card`, if any; return the address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    url = str(api.create_repo(repository, private=private, exist_ok=True))
    contents = {name: folder / name for name in names} | ({CARD: card} if card is not None else {})
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api.create_commit(repository, operations, commit_message=f"Upload {folder.parent.name}")  # RUN of RUN/export
    return url


def _to_modelscope(repository: str, folder: Path, names: Sequence[str], card: bytes | None, private: bool) -> str:
    """Upload to ModelScope as `_to_hugging_face` does; ConfigError without its library."""
    try:
        from modelscope_hub.api import HubApi  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(tr("hub=modelscope:… needs ModelScope's library: pip install modelscope")) from None
    api = HubApi()
    if not api.repo_exists(repository, "model"):
        api.create_repo(repository, "model", visibility="private" if private else "public")
    # The card last, as a folder is uploaded as it is on the disk.
    api.upload_folder(
        repository,
        "model",
        folder,
        allow_patterns=[name for name in names if card is None or name != CARD],
        commit_message=f"Upload {folder.parent.name}",
    )
    if card is not None:
        api.upload_file(repository, "model", card, CARD, commit_message="Complete the model card")
    return f"https://modelscope.cn/models/{repository}"


_SENDERS: dict[str, Callable[[str, Path, Sequence[str], bytes | None, bool], str]] = {
    "hf": _to_hugging_face,
    "modelscope": _to_modelscope,
}


@contextmanager
def _library_errors_translated(target: Target) -> Iterator[None]:
    """Turn errors of the hubs' libraries into a ConfigError or CheckpointError of two lines, without tokens."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except Exception as error:  # both libraries raise their own, and those of what they are built on
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None) or getattr(error, "status_code", None)  # of HTTP; None without
        lines = str(error).strip().splitlines()
        reason = hide(lines[0].rstrip(".") if lines else type(error).__name__)
        if status in _REFUSED or type(error).__name__ == "LocalTokenNotFoundError":
            raise ConfigError(
                "{repository}: the hub rejects the upload: {reason}. Set {variable} to a token that may write there.",
                repository=target.repository,
                reason=reason,
                variable=_TOKENS[target.hub],
            ) from error
        raise CheckpointError(
            "{repository}: the upload failed: {reason}. Rerun the same command: files that have arrived are not sent "
            "again.",
            repository=target.repository,
            reason=reason,
        ) from error

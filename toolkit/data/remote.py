"""Files on web servers, read in ranges: what `data.streaming` reads of URLs and of datasets on Hugging Face.

A read that fails is tried again from the byte where it ended, for some minutes. Every answer is compared with the size
and the tag (ETag) that the file had at first, so that no file is read half in one version and half in another.
"""

import io
import os
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit

from toolkit.config.files import DATA_SUFFIXES, is_url
from toolkit.config.schema import SourceConfig
from toolkit.data.readers import uncompressed_name
from toolkit.messages import DataError, reason_of, tr

_RANGE_BYTES = 1 << 20
"""Least bytes that are asked for at once; so much of a file is in memory."""
_LARGEST_LIST_BYTES = 1 << 24
_TIMEOUT_S = 60.0
"""Until a server has to answer, and for all bytes of one range: what came until then is kept, and the rest asked for
again."""
_LEAST_BYTES = 1 << 16
"""Of a range that count as progress; less is a failure."""
_TRIES, _LONGEST_WAIT_S = 10, 30.0
"""Failures in a row after which a file cannot be read, 1, 2, 4, … seconds apart: about four minutes in all."""
_RETRIED = {408, 425, 429, 500, 502, 503, 504}
"""Statuses of answers that may be better the next time."""
_AT_ONCE, _LISTED_AT_ONCE = 16, 500
"""Requests for sizes at the same time; files of a dataset on Hugging Face in a request for theirs."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a file is recognised by."""

    size: int
    tag: str
    """ETag or date of its last change, as the server says it; "" if it says neither."""
    is_fixed: bool = False
    """Whether the URL always names the same content; its servers may tag that otherwise."""


_listed: dict[str, _Facts] = {}
"""URL -> facts, of files on Hugging Face, whose listing tells them."""


class RemotePath(type(Path())):  # type: ignore[misc]  # PosixPath
    """A URL in the place of a file's path."""

    def __str__(self) -> str:
        return str(super().__str__()).replace(":/", "://", 1)  # a path has made one slash of two

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the file's size (`st_size`, the seventh field); all else is 0."""
        return os.stat_result((0, 0, 0, 0, 0, 0, _facts(str(self)).size, 0, 0, 0))

    def open(self, mode: str = "rb", *options: Any, **more: Any) -> IO[Any]:
        """Open the file for reading bytes."""
        return io.BufferedReader(_RangeReader(str(self)), 1 << 16)

    @property
    def tag(self) -> str:
        """Return what the server names this version of the file by; "" if it does not."""
        return _facts(str(self)).tag


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but hands no token to another server, and leaves no encryption."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Return the request to the new URL, or None as urllib does; HTTPError if it would leave https."""
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        if urlsplit(req.full_url).scheme == "https" and urlsplit(newurl).scheme != "https":
            raise HTTPError(newurl, code, "redirected from https to http", headers, fp)
        return request


_OPENER = urllib.request.build_opener(_SafeRedirects)


class _RangeReader(io.RawIOBase):
    """A file behind a URL, of which a range is in memory."""

    def __init__(self, url: str) -> None:
        self.url, self.facts, self.at = url, _facts(url), 0
        self._begin, self._content = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set where the next read begins."""
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.facts.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the range in memory, and return how many bytes that gave. If the position is not in it,
        first ask for the range from there on, of _RANGE_BYTES at least.
        """
        if not self._begin <= self.at < self._begin + len(self._content):
            end = min(self.facts.size, self.at + max(len(buffer), _RANGE_BYTES))
            self._content = read_range(self.url, self.at, end) if self.at < end else b""
            self._begin = self.at
        offset = self.at - self._begin
        content = self._content[offset : offset + len(buffer)]
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)


def read_range(url: str, begin: int, end: int) -> bytes:
    """Return a file's bytes from `begin` to before `end`; DataError if the server fails for minutes or it changed."""
    content = bytearray()

    def attempt() -> bool:
        before = len(content)
        try:
            with _opened(url, begin + before, end) as answer:
                _check_unchanged(url, answer, begin + before)
                _read_rest(answer, content, end - begin)
        except (OSError, HTTPException):
            has_got_further = len(content) - before >= _LEAST_BYTES
            if not has_got_further:
                raise
        return len(content) == end - begin  # False: the rest is asked for next

    _retry(url, attempt)
    return bytes(content)


def _retry(url: str, attempt: Callable[[], bool]) -> None:
    """Call `attempt` until it returns True; if it returns False it has got further, and is called again at once. It
    fails by raising. DataError after _TRIES failures in a row, or after one that will not get better (HTTP 404).
    """
    failures = 0
    while True:
        retry_after = ""  # seconds, if the server says so
        try:
            if attempt():
                return
            failures = 0
            continue
        except HTTPError as error:
            retry_after, reason = error.headers.get("Retry-After") or "", f"HTTP {error.code} {error.reason}"
            is_final = error.code not in _RETRIED
        except (OSError, HTTPException, ValueError) as error:
            is_final, reason = False, f"{type(error).__name__}: {reason_of(error)}"
        failures += 1
        if is_final or failures == _TRIES:
            raise DataError(
                "Cannot read '{path}': {reason}.\n"
                "If the server is up, start again: a run with checkpoints resumes at the row where it was.",
                path=url,
                reason=reason if is_final else tr("{reason}, {count} times in a row", reason=reason, count=failures),
            )
        wait_s = min(_LONGEST_WAIT_S, 2.0 ** (failures - 1))
        time.sleep(min(_LONGEST_WAIT_S, float(retry_after)) if retry_after.isdigit() else wait_s)


def _opened(url: str, begin: int, end: int) -> Any:
    """Ask for a range of a file; return the answer."""
    headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity", **_hub_headers(url)}
    return _OPENER.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)  # noqa: S310  http(s) alone


def _read_rest(answer: Any, content: bytearray, size: int) -> None:
    """Append an answer's bytes to `content` until it has `size`; OSError if it ends early or takes too long."""
    until = time.monotonic() + _TIMEOUT_S
    while len(content) < size:
        received = answer.read1(min(1 << 16, size - len(content)))
        if not received:
            raise ConnectionError(tr("the connection was closed early"))
        content += received
        if len(content) < size and time.monotonic() > until:
            raise TimeoutError(tr("the server is too slow"))


def _check_unchanged(url: str, answer: Any, begin: int) -> None:
    """Raise a DataError for an answer that is not of the file as it was at first, and what `_size_by_range` raises."""
    size, facts = _size_by_range(url, answer, begin), _facts(url)
    has_other_tag = not facts.is_fixed and _tag(answer) != facts.tag
    if size != facts.size or has_other_tag:
        raise DataError("{path} was changed while the run was reading it. Restore it, then resume the run.", path=url)


def _size_by_range(url: str, answer: Any, begin: int) -> int:
    """Return the size of the file of which an answer is the range from `begin` on, by its Content-Range.

    Raises:
        DataError: the server knows no ranges.
        ValueError: the answer is of another range; `_retry` asks again.
    """
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
    if answer.status != 206 or not match or answer.headers.get("Content-Encoding", "identity") != "identity":
        raise DataError(
            "'{url}' cannot be read in parts: its server does not answer Range requests.\n"
            "Download the file, then data.path=FILE.",
            url=url,
        )
    if int(match[1]) != begin:
        raise ValueError(tr("it sent byte {sent} in the place of {asked}", sent=match[1], asked=begin))
    return int(match[2])


def _tag(answer: Any) -> str:
    return str(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")


@lru_cache(1 << 16)
def _facts(url: str) -> _Facts:
    """Return a file's size and tag, from the listing that named it or by asking its server for the first byte."""
    if url in _listed:
        return _listed[url]
    facts: list[_Facts] = []

    def attempt() -> bool:
        with _opened(url, 0, 1) as answer:
            facts.append(_Facts(_size_by_range(url, answer, 0), _tag(answer)))
        return True

    _retry(url, attempt)
    return facts[0]


def _hub_headers(url: str) -> dict[str, str]:
    """Return the header with the user's token for Hugging Face; {} for other servers, and without a token."""
    from huggingface_hub import constants, get_token

    token = get_token() if url.startswith(f"{constants.ENDPOINT}/") else None
    return {"Authorization": f"Bearer {token}"} if token else {}


def files_of_url(path: str) -> list[Path]:
    """Return the files that a source's path names: that of a URL, or those of a list of URLs (.txt). DataError for one
    that cannot be streamed, is missing or is empty.
    """
    urls = _urls_of_list(path) if path.endswith(".txt") else [path]
    suffixes = tuple(suffix for suffix in DATA_SUFFIXES if suffix != ".arrow")  # Arrow files are mapped, from a disk
    for url in urls:
        parts = urlsplit(url)
        if not is_url(url) or parts.query or not uncompressed_name(parts.path).endswith(suffixes):
            raise DataError(
                "'{url}' cannot be streamed: a URL must end with {suffixes}, also with .gz or .zst, and hold no query "
                "(?...).\nA list of URLs, one in each line, is a .txt file.",
                url=url,
                suffixes=", ".join(suffixes),
            )
    paths: list[Path] = [RemotePath(url) for url in urls]
    _check_sizes(paths)
    return paths


def _urls_of_list(path: str) -> list[str]:
    """Return the URLs in a list, one in each line but # comments; a list behind a URL may name relative ones."""
    if is_url(path):
        content = read_range(path, 0, min(_facts(path).size, _LARGEST_LIST_BYTES))
    else:
        content = Path(path).read_bytes()
    lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
    urls = [line for line in lines if line and not line.startswith("#")]
    return [urljoin(path, url) for url in urls] if is_url(path) else urls


def _check_sizes(paths: Sequence[Path]) -> None:
    """Raise a DataError for a file that is missing or empty; ask for several sizes at once, which `_facts` keeps."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sizes = [*pool.map(lambda path: path.stat().st_size, paths)]
    for path, size in zip(paths, sizes, strict=True):
        if not size:
            raise DataError("The data file '{path}' is empty.", path=path)


def files_of_hub(source: SourceConfig) -> list[Path]:
    """Return the files of a split of a dataset on Hugging Face, as URLs at the commit that its revision is now, and
    keep their sizes and tags in `_listed`. May raise anything: the caller explains it.
    """
    import datasets
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    if datasets.config.HF_HUB_OFFLINE:
        raise DataError(
            "'{name}' cannot be streamed from Hugging Face: HF_HUB_OFFLINE=1.\n"
            "Unset it, train a copy in the cache with data.streaming=false, or give files: data.path=DIR.",
            name=source.hub,
        )
    builder = datasets.load_dataset_builder(source.hub, source.subset or None, revision=source.revision or None)
    urls_of_split = builder.config.data_files or {}
    if source.split not in urls_of_split:
        raise ValueError(f"no split '{source.split}' in {sorted(map(str, urls_of_split))}")
    urls = urls_of_split[source.split]  # hf://datasets/OWNER/NAME@COMMIT/FILE
    matches = [re.fullmatch(r"hf://datasets/[^@]+@([^/]+)/(.+)", url) for url in urls]
    commits_and_files = [(match[1], match[2]) for match in matches if match]
    if not commits_and_files or len(commits_and_files) < len(urls):
        raise ValueError("files outside of the repository")
    commit, names = commits_and_files[0][0], [name for _, name in commits_and_files]  # all are of one commit
    details: dict[str, RepoFile] = {}
    for begin in range(0, len(names), _LISTED_AT_ONCE):
        part = names[begin : begin + _LISTED_AT_ONCE]
        items = HfApi().get_paths_info(source.hub, part, revision=commit, repo_type="dataset")
        details |= {item.path: item for item in items if isinstance(item, RepoFile)}
    paths: list[Path] = []
    for name in names:
        item = details[name]
        path = RemotePath(hf_hub_url(source.hub, name, repo_type="dataset", revision=commit))
        _listed[str(path)] = _Facts(item.size, item.lfs.sha256 if item.lfs else item.blob_id, is_fixed=True)
        paths.append(path)
    _check_sizes(paths)
    return paths

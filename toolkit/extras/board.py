"""`toolkit board`: a web page on this machine to look at runs, write recipes, see samples, and chat with a model.

Reports, checks and plans are those of the commands; samples, chats and runs are child processes. Runs that it started
continue when it ends; a new board finds them by their records in .board/.
"""

import asyncio
import hmac
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import resources
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import SplitResult, urlsplit

import jinja2
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from toolkit import children, disk, messages
from toolkit.config import devices, files, mesh, validate
from toolkit.config.dotted_keys import leaves, set_leaf
from toolkit.config.hub import needs_lookup
from toolkit.config.load import LoadedConfig, group_choices, load, to_dict
from toolkit.extras.new_recipe import gpus_here
from toolkit.extras.translate.convert import inline
from toolkit.jobs.check import check_recipe, machine_for
from toolkit.messages import say, tr
from toolkit.plan import layouts, search, speed, summary
from toolkit.plan.lookup import outline_of
from toolkit.plan.machine import Machine
from toolkit.report import figures, page
from toolkit.report.run import FAILED, distinct_names, is_run, is_worked_on, no_answer, read_run
from toolkit.report.verdict import verdict_of
from toolkit.secrets import hide

HOSTS = ("127.0.0.1", "localhost")
"""Host names that requests may have: against DNS rebinding, by which another site's name resolves to this machine."""
_FILES = {"board.js": "text/javascript", "board.css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = (  # its scripts are those that its own policy names by their hashes
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_STAMPED = ("metrics.jsonl", "DONE", "FAILED", "config.yaml", "data.json")
"""Files whose modification times tell whether a run has changed."""
_LOG_BYTES = 64 << 10
"""Bytes of the end of a log that are shown."""
_ROW_S, _READING_S, _WORKING_S = 5.0, 30.0, 600.0
"""Limits for one listing of runs, for requests of _READING, and for all others: a file server may not answer."""
_READING = ("runs", "log", "report", "look")
_MOST_FOLDERS = 1000
"""Directories that are looked into, of the directory of runs and of each one in it."""
_CURVE_POINTS = 40
"""Most points of the small loss curve in the table of runs."""
_KINDS = (
    ("values", dict),
    ("groups", dict),
    *((name, str) for name in ("gpus", "base", "file", "path", "run", "name")),
)
Body = Mapping[str, Any]
"""The JSON object that the page sends with a request. A recipe has `base` (another's name), `groups` (group -> choice),
`values` (dotted key -> text) and `gpus` to plan for.
"""


class Board:
    """The actions behind the page's requests. `runs`: the runs' directory; `folder`: temporary, for typed recipes."""

    def __init__(self, runs: Path, folder: Path) -> None:
        self.runs, self.folder, self.launches = runs, folder, Launches(runs)
        self.chat: subprocess.Popen[str] | None = None
        self.tool: subprocess.Popen[str] | None = None
        """The command whose output a page is shown: `toolkit new` or `toolkit show`."""
        self.pending_answers = 0
        """Number of answers that the model has not finished yet."""
        self._rows: dict[Path, tuple[object, dict[str, Any]]] = {}
        """Run -> (what its row was made of, the row)."""
        self._waiting: dict[tuple[str, Path], float] = {}
        """(kind of reading, directory) of threads that are reading -> since when; see `_read_in_threads`."""
        self.actions: dict[str, Callable[[Body], Mapping[str, Any]]] = {
            "runs": self.list_runs,
            "log": self.log,
            "look": check_directory,
            "form": lambda body: recipe_form(),
            "check": lambda body: examine_recipe(body, self.folder),
            "save": save_recipe,
            "start": self.launches.start,
            "stop": self.launches.stop,
            "interrupt": self.interrupt,
            "close": self.close,
        }
        self.streams: dict[str, Callable[[Body], Iterator[str]]] = {
            "new": self.new,
            "samples": self.samples,
            "open": self.open_chat,
            "ask": self.ask,
        }
        """Requests answered by a process's output as it comes; processes end with the thread that starts them: main."""

    def list_runs(self, body: Body) -> dict[str, Any]:
        """Return `heads` and `rows` of a table of all runs, the newest first, with those that were started here and
        have no directory yet, and a `note`. A directory that does not answer in time is a row that says so.

        A row has what `_row` returns, and `run` (name below the directory of runs; "" if there is no directory, which
        the page does not link to), `is_alive` (can be stopped) and `has_log` (was started by a board).
        """
        heads = page.overview([]).heads
        blank = [page.NONE] * (len(heads) - 2)  # cells behind the name and the state
        folders, is_cut = _directories(self.runs)
        runs_by_folder = self._read_in_threads("look", _runs_in, folders)
        runs = [run for inner in runs_by_folder.values() if isinstance(inner, list) for run in inner]
        unread = {path: error for path, error in runs_by_folder.items() if isinstance(error, Exception)}
        outcomes = unread | self._read_in_threads("read", self._row, runs)
        rows = [self._listed_row(path, outcome, blank) for path, outcome in outcomes.items()]
        without_directory = {*self.launches.names()} - {row["run"] for row in rows}
        rows += [self._launched_row(name, blank) for name in without_directory]
        rows.sort(key=lambda row: -float(row["stamp"]))
        note = tr("Only {count} of the directories are listed.", count=f"{_MOST_FOLDERS:,}") if is_cut else ""
        return {"heads": heads, "rows": rows, "note": note}

    def _listed_row(self, path: Path, outcome: dict[str, Any] | Exception, blank: Sequence[str]) -> dict[str, Any]:
        """Return the row of a directory: `outcome`, as `_row` returns it, or one that shows the error of reading it."""
        name = str(path.relative_to(self.runs))
        if isinstance(outcome, Exception):
            state = "unfinished" if isinstance(outcome, _Waiting) else "failed"
            outcome = {"stamp": 0.0, "state": state, "cells": [name, hide(str(outcome)), *blank], "path": str(path)}
        is_alive = outcome["state"] == "running" or self.launches.is_alive(name)
        return {"run": name, **outcome, "is_alive": is_alive, "has_log": self.launches.log(name).is_file()}

    def _launched_row(self, name: str, blank: Sequence[str]) -> dict[str, Any]:
        """Return the row of a run that a board has started, and that has no directory (yet)."""
        is_alive = self.launches.is_alive(name)
        word, state = (tr("starting"), "running") if is_alive else (tr("did not start"), "failed")
        row = {"run": "", "name": name, "state": state, "cells": [name, word, *blank]}
        return row | {"stamp": self.launches.started(name), "has_log": True, "is_alive": is_alive}

    def _read_in_threads(self, kind: str, read: Callable[[Path], Any], paths: Sequence[Path]) -> dict[Path, Any]:
        """Read `paths` side by side, for at most _ROW_S in all; return path -> what `read` returns, or an error: its
        own, a _Waiting if it takes longer, or a RunFolderError from _READING_S on. A thread that still waits for a file
        server cannot be ended: later requests of this `kind` ("look" or "read") find it and start no second one.
        """
        outcomes: dict[Path, Any] = {}

        def run(path: Path) -> None:
            """Read a path in a thread of its own."""
            try:
                outcomes[path] = read(path)
            except Exception as error:  # of a file that holds anything: the others are shown
                outcomes[path] = error
            finally:
                self._waiting.pop((kind, path), None)

        threads, began = [], time.monotonic()
        for path in paths:
            if (kind, path) not in self._waiting:
                self._waiting[kind, path] = began
                threads.append(threading.Thread(target=run, args=(path,), name=f"reading {path}", daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join(max(began + _ROW_S - time.monotonic(), 0))
        for path in paths:
            if path not in outcomes:
                seconds = time.monotonic() - self._waiting.get((kind, path), began)  # perhaps since an earlier request
                is_late = seconds >= _READING_S
                outcomes[path] = no_answer(path, _READING_S) if is_late else _Waiting(tr("still being read …"))
        return {path: outcomes[path] for path in paths}

    def _row(self, path: Path) -> dict[str, Any]:
        """Return a run's row of the table, cached until its files change: `path`, `stamp` (epoch seconds of its last
        change, by which rows are sorted), `state`, `cells`, `curve` (some of its losses), `verdict`, and `has_model`
        (one that can be loaded for a chat).
        """
        times = [(path / name).stat().st_mtime for name in _STAMPED if (path / name).is_file()] or [0.0]
        has_model = any((path / name).exists() for name in ("checkpoints/latest", "export"))
        version = (times, is_worked_on(path), has_model)
        if path not in self._rows or self._rows[path][0] != version:
            run = read_run(path)
            losses = [loss.mean for _, loss in run.history.training.series("loss")]
            stride = -(-len(losses) // _CURVE_POINTS) or 1  # rounded up, so that no more points are left
            verdict = verdict_of(run)
            failure = run.failure.splitlines()[0] if run.status == FAILED and run.failure else ""
            row = {
                "path": str(path),
                "stamp": max(times),
                "state": run.status,
                "cells": [messages.printable(hide(cell)) for cell in page.overview([run]).rows[0]],
                "curve": [*losses[:-1:stride], *losses[-1:]],  # always with the last loss
                "verdict": messages.printable(hide(failure)) or (verdict.text if verdict else ""),
                "has_model": has_model,
            }
            self._rows[path] = version, row
        return self._rows[path][1]

    def report(self, names: list[str]) -> str:
        """Return the HTML report of one run, or of several in comparison."""
        for name in names or [""]:  # no name at all is an error, too
            parts = Path(name).parts  # RUN, or SWEEP/RUN; names come from the browser, and must not lead elsewhere
            is_inside = 0 < len(parts) < 3 and not any(part.startswith((".", os.sep)) for part in parts)
            if not (is_inside and is_run(self.runs / name)):
                raise messages.RunFolderError("there is no run {name}.", name=name)
        runs = [read_run(self.runs / name) for name in dict.fromkeys(names)]
        distinct_names(runs)
        return page.render(runs, figures.draw(runs), "report")

    def log(self, body: Body) -> dict[str, str]:
        """Return the end of the output of a run that was started here."""
        name = str(body.get("run"))
        if name not in self.launches.names():
            raise messages.RunFolderError("there is no run {name}.", name=name)
        with disk.open_regular_file(self.launches.log(name)) as log:
            log.seek(max(os.fstat(log.fileno()).st_size - _LOG_BYTES, 0))
            return {"text": messages.printable(hide(log.read().decode(errors="replace")))}

    def new(self, body: Body) -> Iterator[str]:
        """Start `toolkit new` with the answers `model`, `data` and `gpus`, which writes the recipe `file`; return an
        iterator of JSON lines: {"text"} of each line that it prints, and after success what the page's form for a run
        begins with: `file`, `name` of the run, `base` (the recipe's name, "" if it is not found by name) and `ranks`.
        """
        file = Path(str(body.get("file", "")))
        words = [f"{name}={body[name]}" for name in ("model", "data", "gpus") if str(body.get(name, "")).strip()]
        with suppress(OSError):  # the command says so
            file.parent.mkdir(parents=True, exist_ok=True)
        process = self._start_tool("new", *words, f"output={file}")

        def lines() -> Iterator[str]:
            """Yield the JSON lines that `new` returns: the process's output, and after success what the recipe is."""
            for line in _output(process):
                yield json.dumps({"text": line}) + "\n"
            if process.wait() == 0:
                ranks = re.match(r"\d+", str(body.get("gpus", "")).strip())  # the 8 of 8x80GB
                path_by_name = files.known_recipes().get(file.stem, Path())  # what recipe=NAME would take
                base = file.stem if path_by_name.absolute() == file.absolute() else ""
                recipe = {"file": str(file), "name": file.stem, "base": base, "ranks": ranks[0] if ranks else "1"}
                yield json.dumps(recipe) + "\n"

        return lines()

    def samples(self, body: Body) -> Iterator[str]:
        """Start `toolkit show` on the typed recipe; return an iterator of its output lines, with terminal colors."""
        problems, file = messages.Problems(), self.folder / "samples.yaml"
        file.write_text(recipe_text(body, problems), encoding="utf-8")
        problems.raise_all()
        words = [f"recipe={file}", "color=always", f"n={body.get('n', 5)}", f"split={body.get('split', 'train')}"]
        return _output(self._start_tool("show", *words))

    def _start_tool(self, *words: str) -> "subprocess.Popen[str]":
        """Start a command of the toolkit, in place of the one whose output was shown before."""
        if self.tool is not None:
            self.tool.kill()
        words = (*words, f"language={messages.current_language()}")
        self.tool = _start_module("toolkit", *words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        return self.tool

    def open_chat(self, body: Body) -> Iterator[str]:
        """Start a process that loads the model in `path`; return an iterator of its lines until it is loaded, of which
        {"end" begins the last, as in an answer.
        """
        self.close(body)
        self.chat = _start_module("toolkit.jobs.chat", str(body.get("path", "")), messages.current_language())
        self.pending_answers = 1
        return self._answer()

    def ask(self, body: Body) -> Iterator[str]:
        """Return an iterator that sends the question `text` to the loaded model and yields the answer's lines; it may
        wait for the model even to send. ConfigError if no model is loaded.
        """
        if self.chat is None or self.chat.poll() is not None:
            raise messages.ConfigError(tr("no model is loaded."))
        questions = self.chat.stdin

        def lines() -> Iterator[str]:
            """Send the question, and yield the lines of its answer."""
            assert questions is not None
            with suppress(OSError, ValueError):  # the process has ended, which `_answer` says, or was closed
                self.pending_answers += 1
                questions.write(json.dumps(str(body.get("text", ""))) + "\n")
                questions.flush()
            yield from self._answer()

        return lines()

    def _answer(self) -> Iterator[str]:
        """Yield the lines of the answer to the last question; {"end" begins its last line. Answers come in order: the
        rest of an earlier one, whose page was reloaded before it had ended, comes first and is dropped.
        """
        assert self.chat is not None and self.chat.stdout is not None
        for line in self.chat.stdout:
            is_awaited = self.pending_answers == 1  # else a question behind this one is still to be answered
            if line.startswith('{"end"'):
                self.pending_answers -= 1
            if is_awaited:
                yield line
            if not self.pending_answers:
                return
        yield json.dumps({"closed": tr("The model's process has ended.")}) + "\n"

    def interrupt(self, body: Body) -> dict[str, str]:
        """Stop the answer that the model is giving."""
        if self.chat is not None and self.pending_answers:
            self.chat.send_signal(signal.SIGINT)
        return {}

    def end(self) -> None:
        """Kill the processes that a page may be waiting for, as the board ends."""
        for process in filter(None, (self.chat, self.tool)):
            process.kill()

    def close(self, body: Body) -> dict[str, str]:
        """End the model's process, which frees its memory."""
        if self.chat is not None:
            self.chat.kill()
            self.chat.wait()
            for pipe in filter(None, (self.chat.stdin, self.chat.stdout)):
                with suppress(OSError):  # a question that it has not read
                    pipe.close()
            self.chat, self.pending_answers = None, 0
        return {}


class _Waiting(Exception):
    """A directory is still being read."""


def _directories(folder: Path) -> tuple[list[Path], bool]:
    """Return the first _MOST_FOLDERS entries of a directory that are not hidden, and whether there are more; nothing
    is asked about each of them, as one may not answer.
    """
    try:
        with os.scandir(folder) as entries:
            visible = (entry.name for entry in entries if not entry.name.startswith("."))
            names = [*islice(visible, _MOST_FOLDERS + 1)]
    except (FileNotFoundError, NotADirectoryError):
        return [], False
    return [folder / name for name in sorted(names)[:_MOST_FOLDERS]], len(names) > _MOST_FOLDERS


def _runs_in(path: Path) -> list[Path]:
    """Return a path if it is a run's directory, else the runs in it, such as those of a sweep."""
    return [path] if is_run(path) else [inner for inner in _directories(path)[0] if is_run(inner)]


def check_directory(body: Body) -> dict[str, Any]:
    """Raise ConfigError unless `path` is a directory; the answer is empty."""
    path = str(body.get("path", ""))
    if not path or not Path(path).is_dir():
        raise messages.ConfigError("there is no directory {folder}", folder=path)
    return {}


def _output(process: "subprocess.Popen[str]") -> Iterator[str]:
    """Yield the lines that a process prints; end the process when the page is left."""
    with process:
        try:
            yield from process.stdout or ()
        except GeneratorExit:  # who has left the page does not wait
            process.kill()
            raise


def _start_module(module: str, *words: str, **options: Any) -> "subprocess.Popen[str]":
    """Start a module as a child process with text pipes."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8", **options}
    return children.start([sys.executable, "-m", module, *words], **pipes)


class Guard:
    """ASGI middleware: answers only requests with the token and one of HOSTS as host, and sets security headers."""

    def __init__(self, app: Any, token: str, cookie: str) -> None:
        self.app, self.token, self.cookie = app, token, cookie

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request, or reject it with status 403."""
        if scope["type"] != "http":  # there is no route for anything else
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        # The printed address has the token; the page that it opens sets the cookie, which all other requests have.
        shown_token = request.query_params.get("token") if scope["path"] == "/" else None
        shown_token = shown_token or request.cookies.get(self.cookie, "")
        has_token = hmac.compare_digest(shown_token.encode(), self.token.encode())
        is_allowed = _split_url(f"//{host}").hostname in HOSTS and has_token
        if origin and _split_url(origin).netloc != host:  # another site's page, to whose request the cookie was added
            is_allowed = False

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            """Send a message with the security headers that it lacks."""
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                usual = ((name.lower().encode(), value.encode()) for name, value in _HEADERS.items())
                message["headers"] = [*message["headers"], *(header for header in usual if header[0] not in present)]
            await send(message)

        rejected = PlainTextResponse(tr("Open the address that `toolkit board` has printed."), status_code=403)
        await (self.app if is_allowed else rejected)(scope, receive, with_headers)


def _split_url(address: str) -> SplitResult:
    """Return the parts of an address that a browser sent, empty ones if it is malformed, such as `[::1`."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


class _Worker:
    """Runs a page's requests in daemon threads, those of one name one after another, so that no request waits for one
    of another kind that a file server holds up. The board's end does not wait for them.
    """

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def do(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(*arguments)` for the request `name`; RunFolderError if that takes too long."""
        seconds, loop = _READING_S if name in _READING else _WORKING_S, asyncio.get_running_loop()
        result: Future[Any] = Future()  # set in the thread
        has_ended = asyncio.Event()  # wakes up this coroutine

        def run() -> None:
            """Call the function in the thread, and keep its result or error."""
            try:
                result.set_result(function(*arguments))
            except BaseException as error:  # raised again by `result.result()`
                result.set_exception(error)
            with suppress(RuntimeError):  # the loop is closed: the board has ended
                loop.call_soon_threadsafe(has_ended.set)

        async with self.turns[name]:
            # Not asyncio.to_thread: Python would wait for its threads at the board's end.
            threading.Thread(target=run, name=name, daemon=True).start()
            with suppress(asyncio.TimeoutError, asyncio.CancelledError):  # cancelled as the board ends
                await asyncio.wait_for(has_ended.wait(), seconds)
        if not result.done():
            raise no_answer(self.runs, seconds)
        return result.result()


def _is_body(body: Any) -> bool:
    """Whether what a page sent is an object whose values have the types of _KINDS, where it has them."""
    return isinstance(body, dict) and all(isinstance(body[key], kind) for key, kind in _KINDS if key in body)


def application(board: Board, token: str, cookie: str) -> Guard:
    """Return the ASGI application that serves the page, its files, reports and actions."""
    work = _Worker(board.runs)

    def page(request: Request) -> Response:
        """Answer / with the page, and set the token as a cookie."""
        response = HTMLResponse(_page())
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response

    def file(request: Request) -> Response:
        """Answer /file/NAME with a script or style sheet."""
        name = request.path_params["name"]
        return Response(_file(name), media_type=_FILES[name]) if name in _FILES else Response(status_code=404)

    async def report(request: Request) -> Response:
        """Answer /report?run=NAME… with the report of runs."""
        try:
            text = await work.do("report", board.report, request.query_params.getlist("run"))
        except messages.ToolkitError as error:
            return Response(str(error), status_code=400)
        return HTMLResponse(text, headers={"Content-Security-Policy": _REPORT_POLICY})

    async def act(request: Request) -> Response:
        """Answer POST /do/NAME, whose body is a JSON object: by the lines of the stream NAME, or by the JSON that the
        action NAME returns. Errors are {"error": TEXT} with status 400, or 404 if there is no NAME.
        """
        name = request.path_params["name"]
        try:
            body = messages.parsed_json(await request.body())
            if not _is_body(body):
                raise ValueError(tr("it is no object of the texts that this request takes"))
            if name == "open":  # an action first: unlike a stream it has a time limit, and a status if it fails
                await work.do("look", check_directory, body)
            if name in board.streams:
                return StreamingResponse(board.streams[name](body), media_type="text/plain; charset=utf-8")
            if name in board.actions:
                return JSONResponse(await work.do(name, board.actions[name], body))
        except messages.ToolkitError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:  # of whatever was sent
            text = tr("the request {name} cannot be answered: {reason}.", name=name, reason=str(error).rstrip("."))
            return JSONResponse({"error": text}, status_code=400)
        return JSONResponse({"error": tr("there is no request {name}.", name=name)}, status_code=404)

    routes = [
        Route("/", page),
        Route("/file/{name}", file),
        Route("/report", report),
        Route("/do/{name}", act, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), token, cookie)


def serve(runs: Path, port: int) -> None:
    """Serve the board until Ctrl-C; ConfigError if the port cannot be used. Port 0 takes a free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOSTS[0], port))
        listener.listen()  # a browser that is quicker than what follows waits
    except OSError as error:
        raise messages.ConfigError(
            "port {port} cannot be used: {reason}.", port=port, reason=error.strerror or error
        ) from error
    token, port = secrets.token_urlsafe(32), listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="toolkit-board-") as folder:
        board = Board(runs, Path(folder))
        config = uvicorn.Config(
            application(board, token, f"board-{port}"),  # cookies are of a host: each board there has its own
            access_log=False,  # it would hold the token
            log_level="warning",
            lifespan="off",  # the application has nothing to start or end
            ws="none",  # no WebSockets
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        say("Open this address; it lets in whoever knows it. Ctrl-C ends the board, runs continue.")
        messages.write_to_stdout(f"  http://{HOSTS[0]}:{port}/?token={token}")  # `say` would hide the token
        # Once it has ended, uvicorn raises the signal that ended it again. As KeyboardInterrupt, which Ctrl-C raises
        # anyway, SIGTERM is suppressed below.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with suppress(KeyboardInterrupt):
                server, default_handler = uvicorn.Server(config), uvicorn.Server.handle_exit

                def handle_exit(number: int, frame: FrameType | None) -> None:
                    """End the board's processes before uvicorn handles the signal."""
                    board.end()  # else uvicorn would wait for its streams to end
                    default_handler(server, number, frame)

                server.handle_exit = handle_exit  # type: ignore[assignment]
                server.run(sockets=[listener])
        finally:
            board.close({})


def _file(name: str) -> str:
    """Return the text of a packaged file of the page."""
    return (resources.files("toolkit.extras") / "page" / name).read_text(encoding="utf-8")


def _page() -> str:
    """Return the board's HTML page in the current language."""
    language = "zh-CN" if messages.current_language() == "zh" else "en"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_file("board.html.j2")).render(language=language, tr=tr)


class Launches:
    """The runs that a board has started in a directory of runs, recorded in .board/."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.folder = runs, runs / ".board"
        self._children: list[Any] = []
        """Launchers that this process has started; `is_alive` polls them, as one that has ended stays a zombie else."""

    def names(self) -> list[str]:
        """Return the names of the runs that were started by a board."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def start(self, body: Mapping[str, Any]) -> dict[str, str]:
        """Start `toolkit launch` in a process that outlives the board, and record it in .board/. Return what is `said`.
        `body`: as typed into the form, the run's `name`, its `recipe` (a name or a file) and `ranks` (their number, of
        GPUs or CPU processes of this machine). ConfigError or RunFolderError if one of them cannot be used.
        """
        name, recipe, ranks = (str(body.get(word, "")).strip() for word in ("name", "recipe", "ranks"))
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise messages.ConfigError(tr("a run needs a name of letters, digits, `-`, `_` and `.`."))
        if not re.fullmatch(r"[1-9]\d{0,3}", ranks):
            raise messages.ConfigError("{name} = {text} is not a positive whole number.", name="--num_gpus", text=ranks)
        path = files.known_recipes().get(recipe, Path(recipe))  # by its name, else the file itself
        if path.suffix not in (".yaml", ".yml") or not path.is_file():
            raise messages.ConfigError("{file} is no recipe: save it first.", file=recipe)
        if self.is_alive(name) or is_worked_on(self.runs / name):
            raise messages.RunFolderError("{name} is running already.", name=name)
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "toolkit", "launch", *_gpu_options(ranks), f"run.name={name}"]
        command += [f"recipe={files.quoted(path.resolve())}", f"run.dir={files.quoted(self.runs.resolve())}"]
        with self.log(name).open("ab") as log:
            child = children.start_detached(command, stdout=log, stderr=subprocess.STDOUT)
        self._children.append(child)
        # With its creation time, by which `is_alive` tells it from a later process of the same number.
        record = {"pid": child.pid, "created": psutil.Process(child.pid).create_time(), "command": command}
        disk.write_atomically(self.folder / f"{name}.json", json.dumps(record).encode())
        return {"said": tr("Started {name}.", name=name)}

    def stop(self, body: Mapping[str, Any]) -> dict[str, str]:
        """Stop a run as Ctrl-C does: it saves a checkpoint after its current step. Return what was `said`."""
        name = str(body.get("run", ""))
        if self.is_alive(name):
            os.kill(self._record(name)["pid"], signal.SIGTERM)
        elif is_worked_on(self.runs / name):  # started elsewhere
            (self.runs / name / "stop").touch()  # the file that every run looks for
        else:
            raise messages.RunFolderError("{name} is not running.", name=name)
        return {"said": tr("{name} saves a checkpoint and stops.", name=name)}

    def is_alive(self, name: str) -> bool:
        """Whether the launcher that a board started for a run is still running."""
        self._children = [child for child in self._children if child.poll() is None]  # else zombies would stay
        try:
            record = self._record(name)
            process = psutil.Process(record["pid"])
            is_same = process.create_time() == record["created"]  # another process may have got the pid since
            return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
        except (OSError, ValueError, KeyError, psutil.Error):
            return False

    def log(self, name: str) -> Path:
        """Return the file with the output of a run's launcher."""
        return self.folder / f"{name}.log"

    def started(self, name: str) -> float:
        """Return when a run was last started by a board (epoch seconds); now if that is not recorded yet."""
        return float(self._record(name)["created"]) if (self.folder / f"{name}.json").is_file() else time.time()

    def _record(self, name: str) -> dict[str, Any]:
        """Return pid, creation time and command of a run's launcher."""
        return dict(json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8")))


def _gpu_options(ranks: str) -> list[str]:
    """Return DeepSpeed's options for a run on `ranks` GPUs of this machine (or CPU processes).

    If CUDA_VISIBLE_DEVICES gives this board as many by their numbers, such as "4,5,6", the run takes the first of them:
    `--include localhost:4,5`. With `--num_gpus 2` DeepSpeed would take GPUs 0 and 1, so `toolkit launch` would reject
    it. Without the variable, or with other values, it is `--num_gpus`, and `toolkit launch` says what is wrong, if any.
    """
    visible = os.environ.get(devices.visible_variable(), "").split(",")
    chosen = visible[: int(ranks)]
    has_enough = len(chosen) == int(ranks) and all(gpu.strip().isdecimal() for gpu in chosen)
    return ["--include", f"localhost:{','.join(chosen)}"] if has_enough else ["--num_gpus", ranks]


_NOT_IN_A_FORM = ("recipe", "defaults")


def recipe_form() -> dict[str, Any]:
    """Return what the forms offer: recipes, groups, keys with sentence and choices, and GPUs (here, or an example)."""
    schema = json.loads((files.shipped_folder("recipes") / "recipe.schema.json").read_text(encoding="utf-8"))
    here = gpus_here().get("gpus", "1x24GB")
    recipes, groups = list(files.known_recipes()), group_choices()
    return {"recipes": recipes, "groups": groups, "keys": list(_keys(schema)), "gpus": here}


def _keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[dict[str, Any]]:
    """Yield every key of the recipe schema below `prefix`, with its sentence in the user's language and its choices."""
    sentences = messages.chinese()["sentences"] if messages.current_language() == "zh" else {}
    for name, key in section["properties"].items():
        value = key.get("anyOf", [key])[0]  # of a key that may be null: anyOf [its type, null]
        if "properties" in value:
            yield from _keys(value, f"{prefix}{name}.")
        elif name not in _NOT_IN_A_FORM:
            text = key.get("description", "")
            choices = ["true", "false"] if value.get("type") == "boolean" else value.get("enum", [])
            yield {"key": prefix + name, "text": sentences.get(text, text), "choices": choices}


def recipe_text(body: Body, problems: messages.Problems) -> str:
    """Return the recipe that was typed, as YAML text; a value that is no YAML is omitted and added to `problems`.

    The base and the groups become Hydra's list of defaults, whose entries `override /zero: stage2` choose a group.
    """
    tree: dict[str, Any] = {}
    for key, value in body.get("values", {}).items():
        text = str(value).replace("\n", " ")  # a value is one line of the recipe: no second one adds other keys
        try:
            files.parse(f"x: {text}", key)  # as it will stand behind its key
        except messages.ConfigError as error:
            problems.add(validate.error_about(str(error), key))
        else:
            set_leaf(tree, key, text)
    base = [body["base"]] if body.get("base") else []
    chosen = [f"override /{group}: {choice}" for group, choice in body.get("groups", {}).items()]
    defaults = "".join(f"  - {item}\n" for item in (*base, *chosen, "_self_"))
    return f"# @package _global_\ndefaults:\n{defaults}\n" + "".join(f"{line}\n" for line in _lines(tree))


def _lines(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the YAML lines of nested values: those of {"optim": {"lr": "1e-4"}} are `optim:` and `  lr: 1e-4`."""
    for name, value in tree.items():
        if isinstance(value, str):
            yield f"{indent}{name}: {value}"
        else:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")


def examine_recipe(body: Body, folder: Path) -> dict[str, Any]:
    """Return of the typed recipe the `text`, all `errors` with their keys (and how many `more`), the output of check
    (`notes`) and `plan`, and the `values` in effect. `folder`: where the text is written to be read. Nothing is
    downloaded: a model known only to Hugging Face is not planned.
    """
    problems, language, notes = messages.Problems(), messages.current_language(), list[str]()
    answer: dict[str, Any] = {"notes": notes, "plan": [], "values": {}}
    write_before, messages.console.write = messages.console.write, notes.append  # what is printed becomes the notes
    file = folder / "recipe.yaml"
    try:
        answer["text"] = recipe_text(body, problems)
        file.write_text(answer["text"], encoding="utf-8")
        words = [f"recipe={file}", f"language={language}"]  # the page's language, whatever the recipe's
        # Problems of its own, which are dropped: `check_recipe` tells of wrong keys and values.
        loaded = problems.attempt(lambda: load(words, problems=messages.Problems()))
        if loaded is not None:
            answer["values"] = {key: inline(value) for key, value in leaves(to_dict(loaded.cfg))}
            gpus = {"gpus": body["gpus"]} if body.get("gpus") else {}  # as `toolkit plan` takes it
            machine = problems.attempt(machine_for, gpus, loaded.cfg)
            check_words = [*words, *([f"world_size={machine.world_size}"] if machine else [])]
            check_words += [f"{name}={value}" for name, value in gpus.items()]
            problems.attempt(lambda: check_recipe(check_words, fetch=False))
            if machine and not problems.errors:
                answer["plan"] = _plan(loaded, machine)
    finally:
        messages.console.write = write_before
        messages.set_language(language)
    # Without the temporary directory, which says nothing to who typed the recipe.
    answer["errors"] = [{"keys": error.keys, "text": str(error).replace(f"{folder}/", "")} for error in problems.errors]
    answer["more"] = problems.more
    return answer


def _plan(loaded: LoadedConfig, machine: Machine) -> list[str]:
    """Return the lines that `toolkit plan` prints; one that says why not, for a model whose size it would look up."""
    model = loaded.cfg.model
    if needs_lookup(model):
        return [tr("No plan: the size of {model} is not known here. `toolkit plan` looks it up.", model=model.path)]
    cfg = mesh.with_micro_batch(loaded.cfg)
    outline = outline_of(cfg)
    rates = speed.rates_of(cfg, machine, outline)
    layout = layouts.evaluate_layout(outline, cfg, machine, rates)
    return summary.plan_lines(outline, machine, rates, layout, list(search.layouts(outline, cfg, machine, rates)))


def save_recipe(body: Body) -> dict[str, Any]:
    """Write the typed recipe to `file`, an existing one only with `overwrite`; return what was `said`, and `exists` if
    there was one and nothing was written.
    """
    problems, file = messages.Problems(), Path(str(body.get("file", "")))
    text = recipe_text(body, problems)
    problems.raise_all()
    if file.suffix not in (".yaml", ".yml"):
        raise messages.ConfigError("{file} must end in .yaml.", file=file)
    base = files.known_recipes().get(str(body.get("base", "")))
    if base is not None and base.absolute() == file.absolute():
        raise messages.ConfigError("{file} is the recipe that this one builds on. Choose another file.", file=file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if body.get("overwrite") is True:
            disk.write_atomically(file, text.encode())
        else:
            with file.open("x", encoding="utf-8") as new:
                new.write(text)
    except FileExistsError:
        return {"exists": True, "said": tr("{file} exists already: nothing was written.", file=file)}
    except OSError as error:
        raise messages.ConfigError(
            "cannot write {file}: {reason}.", file=file, reason=error.strerror or error
        ) from error
    return {"said": tr("Wrote {file}.", file=file)}

"""A stand-in for vLLM's server: it answers prompts of token ids with token ids that follow from the seed alone.

python tests/completion_server.py FOLDER PORT NAME…

FOLDER/plan.json lists the faults of each start, {} for none; the last entry is that of all further starts. FOLDER/pids
gets a line per start, FOLDER/asked.jsonl each request for an answer.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER, PORT, NAMES = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
_lock = threading.Lock()
_count = 0


def answer_ids(seed: int) -> list[int]:
    """Return one to five ids of small letters, of a vocabulary that begins with bytes."""
    return [ord("a") - ord("!") + (seed * 7 + place) % 26 for place in range(1 + seed % 5)]


class Handler(BaseHTTPRequestHandler):
    """Answers requests, with the faults of this start."""

    def do_GET(self) -> None:
        """List the names of the model."""
        self.reply(json.dumps({"data": [{"id": name} for name in NAMES]}).encode())

    def do_POST(self) -> None:
        """Answer a prompt. Questions for one token, by which a client looks for a server, meet fewer faults."""
        global _count
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["max_tokens"] > 1:
            with _lock:
                _count += 1
                number = _count
                with (FOLDER / "asked.jsonl").open("a") as file:
                    file.write(json.dumps(body) + "\n")
            if number > FAULTS.get("dies_after", number):
                os._exit(1)
            if number == FAULTS.get("late"):
                time.sleep(3)
            if number % FAULTS.get("nonsense_every", number + 1) == 0 or body["seed"] in FAULTS.get("never", ()):
                self.reply(b"<html>")
                return
        if _count > FAULTS.get("hangs_after", _count):
            time.sleep(3600)
        ids = answer_ids(body["seed"]) if "seed" in body else [1]
        choice = {"text": "as its ids" if ids else "", "token_ids": ids, "finish_reason": "stop"}
        self.reply(json.dumps({"model": body["model"], "choices": [choice]}).encode())

    def reply(self, content: bytes) -> None:
        """Send a body."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


if __name__ == "__main__":
    with (FOLDER / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    plan = json.loads((FOLDER / "plan.json").read_text())
    FAULTS: dict[str, Any] = plan[min(len((FOLDER / "pids").read_text().split()), len(plan)) - 1]
    if "says" in FAULTS:
        sys.exit(FAULTS["says"])
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()

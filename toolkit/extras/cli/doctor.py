"""Check the nodes before a run: what would make it fail, and the command that fixes it.

toolkit doctor [launcher options] [recipe=NAME] [hostfile=FILE] [key=value …]

  hostfile=FILE, --include …, --master_port N   as for `toolkit launch`; default: this node only
  recipe=NAME, key=value   also check what this recipe needs: files, disks, ops
  quick=true       check each node by itself, without network tests
  timeout_s=30     timeout for each answer of a node
"""

import sys
import time

from toolkit.arguments import one_of, parse, positive_int
from toolkit.config.schema import RunConfig
from toolkit.extras.doctor import agents, examine, findings
from toolkit.launch import deepspeed
from toolkit.messages import ConfigError, say, tr

_OWN = ("quick", "timeout_s")
_SIGNS = {findings.ERROR: "FAIL", findings.WARNING: "warn", findings.NOTE: "note", "": "ok"}


def run(words: list[str]) -> int:
    if words == ["--agent"]:
        agents.serve(lambda asked: parse(asked).loaded.cfg)
        return 0
    started = time.monotonic()
    _, options, rest = deepspeed.typed_options(words)
    own = dict(word.split("=", 1) for word in rest if word.partition("=")[0] in _OWN and "=" in word)
    overrides = [word for word in rest if word.partition("=")[0] not in _OWN]
    is_quick = one_of(own, "quick", ("false", "true")) == "true"
    cfg = parse(overrides).loaded.cfg if overrides else RunConfig()
    found = examine.plan_examination(options, overrides, cfg)
    found.limit_s = float(positive_int(own, "timeout_s") or found.limit_s)
    found.run(is_quick)
    _tell(found, time.monotonic() - started)
    return ConfigError.exit_code if found.has_errors() else 0


def _tell(found: examine.Examination, seconds: float) -> None:
    """Print a table, and below it what is wrong, the worst first."""
    checks = [check for check in findings.checks() if check in _looked_at(found)]
    width = max(map(len, checks))
    for check in checks:
        levels = {one.level for one in found.findings if one.check == check}
        worst = next((level for level in (findings.ERROR, findings.WARNING, findings.NOTE) if level in levels), "")
        say(f"{check:{width}}  {_SIGNS[worst]:4}  {found.summaries.get(check, '')}".rstrip())
    for level, heading in (
        (findings.ERROR, tr("Would break the run:")),
        (findings.WARNING, tr("May affect the run:")),
        (findings.NOTE, tr("Notes:")),
    ):
        if texts := found.lines(level):
            say("\n".join(["", heading, *texts]))
    say("")
    errors = sum(one.level == findings.ERROR for one in found.findings)
    say(
        "Nodes: {hosts}, errors: {errors}, warnings: {warnings} ({seconds} s).",
        hosts=len(found.resources),
        errors=errors,
        warnings=sum(one.level == findings.WARNING for one in found.findings),
        seconds=f"{seconds:.1f}",
    )
    sys.stdout.flush()


def _looked_at(found: examine.Examination) -> set[str]:
    """Return the checks that were made, so that no check is called good that nobody made."""
    checks = {one.check for one in found.findings} | set(found.summaries)
    if found.ssh.through_ssh:
        checks |= {"ssh", *(("clocks", "environment") if found.facts else ())}
    if found.facts:
        checks |= {"limits", *(("recipe", "files") if found.words else ())}
    without = set() if found.words else {"ops", "disks"}
    return (checks - without) | {one.check for one in found.findings}

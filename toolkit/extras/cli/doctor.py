"""Check the nodes before a run: what would make it fail, and the command that fixes it.

toolkit doctor [launcher options] [recipe=NAME] [hostfile=FILE] [key=value …]
toolkit doctor --report [RUN] [output=FILE.md]

  hostfile=FILE, --include …, --master_port N   as for `toolkit launch`; default: this node only
  recipe=NAME, key=value   also check what this recipe needs: files, disks, ops
  quick=true       check each node by itself, without network tests
  timeout_s=30     timeout for each answer of a node
  --report [RUN]   checks nothing and writes one file to attach to a bug report: versions, GPUs, and of the run
                   RUN its config, last log lines and FAILED. Secrets are masked, home directories become ~
  output=FILE.md   that file; default: doctor-DATE-TIME.md here
"""

import socket
import sys
import time
from pathlib import Path

from toolkit.arguments import parse
from toolkit.command_line import check_output, named_arguments, one_of, positive_int, write_output
from toolkit.config.schema import RunConfig
from toolkit.extras.doctor import agents, examine, findings
from toolkit.launch import deepspeed, hostfile
from toolkit.messages import ConfigError, LaunchError, choose_language, say, tr

_SETTINGS = ("quick", "timeout_s")
"""Arguments of the doctor itself."""
_SIGNS = {findings.ERROR: "FAIL", findings.WARNING: "warn", findings.NOTE: "note", "": "ok"}


def run(words: list[str]) -> int:
    """Examine the nodes and print what was found, or write the report of `--report`; return 0 if nothing would break a
    run, else 2.
    """
    if words == ["--agent"]:  # started by the doctor of another node, to answer its questions about this one
        agents.serve(lambda asked: parse(asked).loaded.cfg)
        return 0
    if "--report" in words:
        return _write_report([word for word in words if word != "--report"])
    started = time.monotonic()
    _, launcher_options, arguments = deepspeed.typed_options(words)
    prefixes = tuple(f"{name}=" for name in _SETTINGS)
    settings = dict(word.split("=", 1) for word in arguments if word.startswith(prefixes))
    overrides = [word for word in arguments if not word.startswith(prefixes)]
    without_language = choose_language(overrides)  # from here on, messages are in it
    overrides = overrides if without_language else []  # language= alone names no recipe
    is_quick = one_of(settings, "quick", ("false", "true")) == "true"
    options_taken_out = ("--report", *deepspeed.OPTIONS)  # a misspelt option may mean one of them
    cfg = parse(overrides, names=_SETTINGS, options=options_taken_out).loaded.cfg if overrides else RunConfig()
    examination = examine.plan_examination(launcher_options, overrides, cfg)
    _reject_example(examination.resources)
    examination.limit_s = float(positive_int(settings, "timeout_s") or examination.limit_s)
    examination.run(is_quick)
    _tell(examination, time.monotonic() - started)
    return ConfigError.exit_code if examination.has_errors() else 0


def _reject_example(resources: hostfile.Resources) -> None:
    """Raise a LaunchError for the nodes of hostfile.example where there are none of these names."""
    if {host: len(gpus) for host, gpus in resources.items()} != {"node1": 8, "node2": 8}:
        return
    try:
        socket.getaddrinfo("node1", None)
    except OSError as error:
        raise LaunchError(
            "{host} is a name in hostfile.example, and no node here has it. Write your nodes into the hostfile, or "
            "make one: toolkit hostfile output=hostfile nodes=…; without hostfile= this node is checked.",
            host="node1",
        ) from error


def _write_report(words: list[str]) -> int:
    """Write the file of `--report`, about this machine and the run that is named, if any; return 0."""
    from toolkit.extras.doctor import attachment  # only now: what reads runs takes a moment to import

    values = named_arguments(words, required=(), optional=("run", "output"), usage="", bare="run")
    values["output"] = values.get("output") or f"doctor-{time.strftime('%Y%m%d-%H%M%S')}.md"
    check_output(values)
    write_output(values, attachment.describe(Path(values["run"]) if values.get("run") else None))
    say(
        "{file} is written. Read it before you attach it: secrets are masked, but paths, host names, prompts in the "
        "config and log lines are in it.",
        file=values["output"],
    )
    return 0


def _tell(examination: examine.Examination, seconds: float) -> None:
    """Print a table of the checks, and below it what each found, the worst first."""
    checks = [check for check in findings.checks() if check in _looked_at(examination)]
    width = max(map(len, checks))
    for check in checks:
        levels = {finding.level for finding in examination.findings if finding.check == check}
        worst = next((level for level in (findings.ERROR, findings.WARNING, findings.NOTE) if level in levels), "")
        say(f"{check:{width}}  {_SIGNS[worst]:4}  {examination.summaries.get(check, '')}".rstrip())
    for level, heading in (
        (findings.ERROR, tr("Would break the run:")),
        (findings.WARNING, tr("May affect the run:")),
        (findings.NOTE, tr("Notes:")),
    ):
        if texts := examination.lines(level):
            say("\n".join(["", heading, *texts]))
    say("")
    errors = sum(finding.level == findings.ERROR for finding in examination.findings)
    say(
        "Nodes: {hosts}, errors: {errors}, warnings: {warnings} ({seconds} s).",
        hosts=len(examination.resources),
        errors=errors,
        warnings=sum(finding.level == findings.WARNING for finding in examination.findings),
        seconds=f"{seconds:.1f}",
    )
    sys.stdout.flush()


def _looked_at(examination: examine.Examination) -> set[str]:
    """Return the checks that were really made: only these are printed as ok. A check with a finding always was."""
    with_findings = {finding.check for finding in examination.findings}
    has_recipe, has_answers = bool(examination.words), bool(examination.facts)
    checks = set(examination.summaries)
    if examination.ssh.through_ssh:
        checks.add("ssh")
        if has_answers:
            checks |= {"clocks", "environment"}  # which are compared between nodes
    if has_answers:
        checks.add("limits")
        if has_recipe:
            checks |= {"recipe", "files"}
    if not has_recipe:
        checks -= {"ops", "disks"}  # a recipe tells which of them a run needs
    return checks | with_findings

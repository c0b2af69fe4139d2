"""Write an HTML report of one or several runs: curves, speed, memory, answers, settings; charts as PNG too.

toolkit report RUN [RUN2 …] [output=FILE.html]
toolkit report runs/SWEEP

  RUN            a run directory, finished or not, wherever it has been copied to; or that of a sweep:
                 all runs that have metrics are compared
  output=FILE    the page; default: report.html in the run directory, for several runs comparison.html here.
                 Charts are saved as PNG files in the directory of the same name next to it, where vl-convert-python
                 is installed

Training writes it at the end (report.enabled), and every report.every steps. The page is one file that needs no
network. An existing report is replaced; other files are never overwritten.
"""

from pathlib import Path

from toolkit.command_line import unknown_option
from toolkit.messages import ConfigError, choose_language, say, tr


def run(words: list[str]) -> None:
    """Write the HTML report of one run, or of several in comparison."""
    output, paths = "", []
    for word in choose_language(words):
        if word.startswith("-"):
            raise unknown_option(word, "", ("output", "language"), ("output=", "language="))
        if word.startswith("output="):
            output = word.partition("=")[2]
        else:  # a run's name may hold a =, as in lr=1e-4
            paths.append(Path(word))
    if not paths:
        raise ConfigError(tr("which run? toolkit report runs/NAME"))
    from toolkit.report.page import make_report  # only now: what draws takes a second to import

    page, images = make_report(paths, Path(output) if output else None)
    say("The report: {file}", file=page)
    if images:
        say("Its charts as pictures: {folder}", folder=images)
    else:
        say("No pictures of its charts: they need a package.  pip install vl-convert-python")

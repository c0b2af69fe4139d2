"""The page of `toolkit data-report`, in the report's look."""

from collections.abc import Callable, Sequence

from toolkit.data.hygiene import OTHER, SIMILAR, Alike, Facts, alike, kinds, spread
from toolkit.data.sources import DataFile
from toolkit.data.tokenize import PrepareReport
from toolkit.messages import tr, translated
from toolkit.report.page import Section, Table, Tile, short, write_page


def data_page(title: str, facts: Facts, files: Sequence[DataFile], prepared: PrepareReport | None) -> str:
    """Return the page of what was found in files; `prepared`: of a recipe whose rows are tokenized."""
    equal, near = alike(facts)
    places = [place for part in facts.places for place in part.tolist()]
    total = len(places)

    def where(row: int) -> str:
        number, line = places[row]
        return f"{files[number].path}:{line}"

    repeated = Table(
        [tr("rows that are there more than once"), tr("rows"), tr("share"), tr("first places")],
        [_alike(tr("equal to an earlier row"), equal, total, where), _alike(tr("nearly so"), near, total, where)],
        note=tr(
            "Nearly: 5-character shingles of questions and answers, lower-cased, without white space, have an "
            "estimated Jaccard similarity of {similar} or more (MinHash of 32 values; equal rows are left out).",
            similar=SIMILAR,
        ),
    )
    sections = [
        Section(id="duplicates", title=tr("Duplicates"), tables=[repeated]),
        Section(
            id="texts", title=tr("Texts to look at"), tables=[_found(facts)] if facts.found else [], empty=_none(facts)
        ),
        Section(id="lengths", title=tr("Lengths and turns"), tables=_lengths(facts)),
        Section(id="languages", title=tr("Scripts"), tables=[_scripts(facts, total)]),
        Section(id="files", title=tr("Files"), tables=[Table([tr("file")], [[str(file.path)] for file in files[:60]])]),
    ]
    tiles = [
        Tile(
            tr("Rows"), short(facts.rows), tr("unusable: {count}", count=f"{facts.bad:,}"), "bad" if facts.bad else ""
        ),
        Tile(tr("Duplicates"), short(equal.count), tr("nearly so: {count}", count=f"{near.count:,}")),
    ]
    if prepared is not None:
        share = f"{prepared.trained_tokens / max(prepared.tokens, 1):.1%}"
        tiles.append(Tile(tr("Tokens"), short(prepared.tokens), tr("of the training split")))
        tiles.append(Tile(tr("Trained tokens"), share, tr("{count} tokens", count=short(prepared.trained_tokens))))
    return write_page(title=title, kind=tr("Data report"), head=[], tiles=tiles, sections=sections)


def _alike(name: str, found: Alike, total: int, where: Callable[[int], str]) -> list[str]:
    pairs = "; ".join(f"{where(row)} = {where(earlier)}" for row, earlier in found.pairs)
    return [name, f"{found.count:,}", f"{found.count / max(total, 1):.2%}", pairs]


def _none(facts: Facts) -> str:
    return "" if facts.found else tr("No control strings of templates, declined or cut answers or unusable rows.")


def _found(facts: Facts) -> Table:
    words, rows = kinds(), []
    for (kind, what), count in sorted(facts.found.items(), key=lambda one: -one[1])[:100]:
        shown = translated(what) if kind == "answer" else what
        rows.append([words[kind], shown, f"{count:,}", ", ".join(facts.examples[kind, what])])
    return Table([tr("what"), tr("which"), tr("rows"), tr("first places")], rows)


def _lengths(facts: Facts) -> list[Table]:
    heads = [tr("characters"), tr("shortest"), tr("median"), "95 %", "99 %", tr("longest")]
    rows = [[tr("questions of a row"), *spread(facts.asked)], [tr("answers of a row"), *spread(facts.answered)]]
    turns = [[str(count), f"{rows:,}"] for count, rows in sorted(facts.turns.items())[:20]]
    return [Table(heads, rows), Table([tr("messages of the user"), tr("conversations")], turns)]


def _scripts(facts: Facts, total: int) -> Table:
    characters = max(sum(facts.scripts.values()), 1)
    rows = [
        [
            tr("digits, signs, white space, others") if name == OTHER else name,
            f"{count / characters:.2%}",
            f"{mostly:,}",
        ]
        for name, count in facts.scripts.most_common()
        if count
        for mostly in [facts.mostly[name]]
    ]
    note = tr("By Unicode's blocks of letters, not by language: Latin is English as well as French.")
    return Table(
        [tr("script"), tr("share of the characters"), tr("rows whose letters are mostly of it")], rows, note=note
    )

// Sphinx's own scores (9.0.4, searchtools.js), but a heading that is mostly the query comes before pages with its words,
// and the pages of docs/ before the changelog, the measurements and the README, which hold words of everything.
var Scorer = {
  score: ([docname, title, anchor, description, score, filename, kind]) =>
    score + (kind === "title" ? 100 : 0) - (docname.startsWith("docs/") ? 0 : 200),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Sphinx's own scores (9.0.4, searchtools.js), but words of search_words.yaml come first, then headings that are mostly
// the query. The changelog, the measurements, the README and the home page hold words of everything: they come last.
var Scorer = {
  score: ([docname, title, anchor, description, score, filename, kind]) =>
    score +
    ({ index: 200, title: 100 }[kind] ?? 0) -
    (docname.startsWith("docs/") && !/index(_zh)?$/.test(docname) ? 0 : 300),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

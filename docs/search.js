// Where pages match a search equally well, how-tos come before the pages that they refer to.
var Scorer = {
  score: ([page, title, anchor, description, score]) => score + (page.startsWith("how-to/") ? 2 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

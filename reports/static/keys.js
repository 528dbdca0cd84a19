// The keyboard: what the mouse can do. Keys typed into fields are the field's.

function rows() {
  return [...document.querySelectorAll("#finding-list .finding")];
}

function move(by) {
  const all = rows();
  const at = all.indexOf(document.activeElement?.closest?.("#finding-list .finding"));
  if (findingList && at + by >= all.length) findingList.more();
  const next = rows()[Math.max(at + by, 0)] || all.at(-1);
  next?.querySelector(".head").focus();
  next?.scrollIntoView({ block: "nearest" });
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  o: () => currentRow() && toggle(currentRow()),
  c: () => currentRow()?.finding && copyPlace(currentRow().finding),
  "/": () => byId("search")?.focus(),
  t: toggleTheme,
  "?": () => byId("help").showModal(),
};

function currentRow() {
  return document.activeElement?.closest?.(".row");
}

function copyPlace(finding) {
  copy(`${finding.path}:${finding.line}:${finding.column}`);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.target.matches("input")) event.target.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const act = KEYS[event.key];
  if (!act || byId("help").open) return;
  event.preventDefault();
  act();
});

// A link to a rule's page opens it.
function openTarget() {
  const target = byId(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) target.open = true;
}

addEventListener("hashchange", openTarget);
openTarget();

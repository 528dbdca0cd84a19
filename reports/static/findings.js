// Findings: which are shown, in which order and groups, and what a row holds once it is opened.

const RANK = Object.fromEntries(SEVERITIES.map((severity, rank) => [severity, rank]));
const MOST_PRINTED = 300;
const ORDER = {
  place: () => 0,  // the order in which they came
  severity: (one, other) => RANK[one.severity] - RANK[other.severity],
  code: (one, other) => (one.code < other.code ? -1 : one.code > other.code ? 1 : 0),
  steps: (one, other) => other.steps.length - one.steps.length,
};

for (const [index, finding] of DATA.findings.entries()) {
  finding.index = index;
  finding.haystack = [finding.code, finding.name, finding.path, finding.symbol, finding.message].join("\n").toLowerCase();
}

function matching(findings, wanted) {
  const words = wanted.search.toLowerCase().split(/\s+/).filter(Boolean);
  return findings.filter(
    (finding) =>
      wanted.severities.has(finding.severity) &&
      (!wanted.rule || finding.code === wanted.rule) &&
      (!wanted.package || finding.package === wanted.package) &&
      words.every((word) => finding.haystack.includes(word)),
  );
}

function arranged(findings, sort, group) {
  const sorted = [...findings].sort((one, other) => ORDER[sort](one, other) || one.index - other.index);
  if (!group) return sorted;
  const groups = new Map();
  for (const finding of sorted) {
    const key = finding[group] || "(none)";
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(finding);
  }
  const largest = [...groups].sort((one, other) => other[1].length - one[1].length);
  return largest.flatMap(([key, members]) => [{ heading: key, members }, ...members]);
}

function findingRow(item) {
  if (item.heading !== undefined) {
    return element("h3", { class: "group" }, item.heading, " ", element("span", { class: "dim" }, String(item.members.length)));
  }
  const head = element(
    "button",
    { type: "button", class: "head", "aria-expanded": "false" },
    element("span", { class: `badge ${item.severity}` }, item.code),
    element("span", { class: "message" }, ...prose(item.message)),
    element("span", { class: "place" }, ...breakable(`${item.path}:${item.line}`), item.symbol ? element("span", { class: "symbol" }, item.symbol) : null),
  );
  const row = element("article", { class: "row finding", role: "listitem" }, head);
  row.finding = item;
  head.addEventListener("click", () => toggle(row));
  return row;
}

function toggle(row, open) {
  const head = row.querySelector(".head");
  const detail = row.querySelector(".detail");
  const wanted = open ?? head.getAttribute("aria-expanded") === "false";
  head.setAttribute("aria-expanded", String(wanted));
  if (wanted && !detail) row.append(row.finding ? findingDetail(row.finding) : classDetail(row.shownClass));
  else if (detail) detail.hidden = !wanted;
}

// What was audited together is fixed together: a file by itself may be understood otherwise.
function findingCommands(finding) {
  const target = DATA.target ?? quoted(finding.path);
  const select = `${target} --select ${finding.code}`;
  const found = [`${finding.path}:${finding.line}:${finding.column}`, `poolaudit rule ${finding.code}`, `poolaudit audit ${select}`];
  if (finding.fix?.hunks.length) {
    const unsafe = finding.fix.safety === "unsafe" ? "--unsafe-fixes " : "";
    found.push(`poolaudit fix --diff ${unsafe}${select}`, `poolaudit fix ${unsafe}${select}`);
  }
  const adopt = adoptCommand(finding);
  if (adopt) found.push(adopt);
  return [...found, `# poolaudit: ignore[${finding.code}]`];
}

// A finding about a whole class stands where the class does.
function adoptCommand(finding) {
  return DATA.classes.find((row) => row.path === finding.path && row.line === finding.line)?.adopt;
}

function findingDetail(finding) {
  return element(
    "div",
    { class: "detail" },
    sourceView(finding),
    finding.fix ? fixView(finding) : null,
    finding.proof ? element("p", {}, `Leak test: ${finding.proof.replaceAll("_", " ")}`) : null,
    element(
      "p",
      { class: "commands" },
      element("a", { href: `#rule-${finding.code}`, class: "rule-link" }, `${finding.code} ${finding.name}`),
      ...findingCommands(finding).map(copyButton),
    ),
    element("p", { class: "dim" }, `fingerprint ${finding.fingerprint}`),
  );
}

function fixView(finding) {
  const { safety, description, hunks } = finding.fix;
  const said = element("p", { class: "fix" }, element("b", {}, `Fix (${safety}): `), ...prose(description));
  return hunks.length ? element("div", {}, said, diffView(hunks)) : said;
}

const findingList = byId("finding-list") && new LazyList(byId("finding-list"), findingRow);
let shownFindings = [];

function readControls() {
  const checked = document.querySelectorAll('[name="severity"]:checked');
  return {
    search: byId("search").value,
    severities: new Set([...checked].map((box) => box.value)),
    rule: byId("rule").value,
    package: byId("package").value,
  };
}

function showFindings() {
  shownFindings = matching(DATA.findings, readControls());
  findingList.show(arranged(shownFindings, byId("sort").value, byId("group").value));
  const all = DATA.findings.length;
  const some = shownFindings.length;
  byId("shown").textContent = some === all ? counted(all, "finding") : `${some.toLocaleString("en")} of ${counted(all, "finding")}`;
}

function offer(select, values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) || 0) + 1);
  for (const value of [...counts.keys()].sort()) {
    select.append(element("option", { value }, `${value || "(none)"} (${counts.get(value)})`));
  }
}

if (findingList) {
  offer(byId("rule"), DATA.findings.map((finding) => finding.code));
  offer(byId("package"), DATA.findings.map((finding) => finding.package));
  const controls = byId("finding-controls");
  controls.addEventListener("input", showFindings);
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("reset", () => setTimeout(showFindings));
  byId("expand-all").addEventListener("click", () => {
    for (const row of document.querySelectorAll("#finding-list .finding")) toggle(row, true);
  });
  document.addEventListener("click", (event) => {
    const chip = event.target.closest("[data-rule]");
    if (!chip) return;
    byId("rule").value = chip.dataset.rule;
    showFindings();
    byId("findings").scrollIntoView();
  });
  addEventListener("beforeprint", () => {
    findingList.more(MOST_PRINTED);
    for (const row of document.querySelectorAll("#finding-list .finding")) toggle(row, true);
  });
  showFindings();
}

// Classes: their support, what they allocate under the reader's assumptions, and a page for each.

const SUPPORT_ORDER = ["none", "partial", "full"];
const PRIORITY_ORDER = ["high", "medium", "low", null];
const MOST_BARS = 20;
const MOST_BYTES = 1024 ** 7;  // more than any machine has, and still a number
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

function assumptions() {
  const fields = document.querySelectorAll(".assume input");
  return Object.fromEntries([...fields].map((field) => [field.name, Math.max(Number(field.value) || 1, 1)]));
}

function bytesOf(row, sizes) {
  if (!row.powers) return 0;
  const bytes = Object.entries(sizes).reduce((sum, [name, size]) => sum * size ** row.powers[name], row.powers.factor);
  return Math.min(bytes, MOST_BYTES);
}

function shownBytes(bytes) {
  const unit = Math.min(Math.floor(Math.log(Math.max(bytes, 1)) / Math.log(1024)), UNITS.length - 1);
  const amount = bytes / 1024 ** unit;
  return `${amount >= 100 || unit === 0 ? Math.round(amount) : amount.toFixed(1)} ${UNITS[unit]}`;
}

function drawBytes() {
  const sizes = assumptions();
  const heaviest = DATA.classes
    .filter((row) => row.powers)
    .map((row) => ({ row, bytes: bytesOf(row, sizes) }))
    .sort((one, other) => other.bytes - one.bytes);
  byId("bytes").hidden = heaviest.length === 0;
  const largest = heaviest[0]?.bytes || 1;
  byId("bytes-bars").replaceChildren(...heaviest.slice(0, MOST_BARS).map(({ row, bytes }) => bytesBar(row, bytes, largest)));
}

function bytesBar(row, bytes, largest) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 10");
  svg.setAttribute("preserveAspectRatio", "none");
  const bar = document.createElementNS(svg.namespaceURI, "rect");
  for (const [name, value] of Object.entries({ class: row.support, width: Math.max((100 * bytes) / largest, 0.4), height: 10 })) {
    bar.setAttribute(name, value);
  }
  svg.append(bar);
  return element(
    "tr",
    {},
    element("th", { scope: "row", title: `${row.path}:${row.line}` }, element("span", {}, row.name)),
    element("td", { title: row.bytes }, svg),
    element("td", { class: "amount" }, shownBytes(bytes)),
  );
}

function classRow(row) {
  const head = element(
    "button",
    { type: "button", class: "head", "aria-expanded": "false" },
    element("span", { class: `badge support ${row.support}` }, row.support),
    element("span", { class: "message" }, element("b", {}, row.name), row.priority ? element("span", { class: "dim" }, ` ${row.priority} priority`) : null, row.reason ? element("span", { class: "dim" }, `, ${row.reason}`) : null),
    element("span", { class: "place" }, ...breakable(`${row.path}:${row.line}`), row.bytes ? element("span", { class: "symbol" }, row.bytes) : null),
  );
  const made = element("article", { class: "row class", role: "listitem" }, head);
  made.shownClass = row;
  head.addEventListener("click", () => toggle(made));
  return made;
}

function classDetail(row) {
  const sizes = assumptions();
  const assumed = Object.entries(sizes).map(([name, size]) => `${name} ${size}`).join(", ");
  const facts = [
    ["bases", row.bases.join(", ") || "none"],
    ["switch", row.switch ? `${row.switch}, ${row.switchDefault === null ? "no default" : row.switchDefault ? "on by default" : "off by default"}` : "none"],
    ["acquires", row.acquires ? "yes" : "no"],
    ["releases", row.releases ? "yes" : "no"],
    ["cleans up", row.cleansUp ? "yes" : "no"],
    ["allocates", row.bytes ? `${row.bytes} bytes: about ${shownBytes(bytesOf(row, sizes))} with ${assumed}` : "nothing large that the code tells"],
  ];
  if (row.edits !== null) facts.push(["effort", `${counted(row.edits, "edit")} to full support${row.adopt ? ", by poolaudit adopt" : ""}`]);
  const list = element("dl", { class: "page" });
  for (const [name, value] of facts) list.append(element("dt", {}, name), element("dd", {}, value));
  return element("div", { class: "detail" }, list, ...classFindings(row), element("p", { class: "commands" }, copyButton(`${row.path}:${row.line}`), row.adopt ? copyButton(row.adopt) : null, copyButton(`poolaudit audit ${DATA.target ?? quoted(row.path)}`)));
}

function classFindings(row) {
  const own = (symbol) => symbol === row.name || symbol.startsWith(`${row.name}.`);
  const found = DATA.findings.filter((finding) => finding.path === row.path && own(finding.symbol));
  if (!found.length) return [element("p", { class: "dim" }, "No findings in this class.")];
  return [element("div", { class: "list inner" }, ...found.map(findingRow))];
}

function arrangedClasses() {
  const words = byId("class-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const support = byId("class-support").value;
  const sizes = assumptions();
  const found = DATA.classes.filter((row) => {
    const haystack = `${row.name}\n${row.path}\n${row.bases.join("\n")}`.toLowerCase();
    return (!support || row.support === support) && words.every((word) => haystack.includes(word));
  });
  const text = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
  const orders = {
    urgency: (one, other) =>
      SUPPORT_ORDER.indexOf(one.support) - SUPPORT_ORDER.indexOf(other.support) ||
      PRIORITY_ORDER.indexOf(one.priority) - PRIORITY_ORDER.indexOf(other.priority) ||
      bytesOf(other, sizes) - bytesOf(one, sizes),
    bytes: (one, other) => bytesOf(other, sizes) - bytesOf(one, sizes),
    name: (one, other) => text(one.name, other.name),
    path: () => 0,
  };
  return found.sort(orders[byId("class-sort").value]);
}

const classList = byId("class-list") && new LazyList(byId("class-list"), classRow);

function showClasses() {
  const found = arrangedClasses();
  classList.show(found);
  const all = DATA.classes.length;
  byId("classes-shown").textContent = found.length === all ? counted(all, "class") : `${found.length} of ${counted(all, "class")}`;
}

if (classList) {
  byId("class-controls").addEventListener("input", showClasses);
  byId("class-controls").addEventListener("submit", (event) => event.preventDefault());
  const assume = document.querySelector(".assume");
  assume.addEventListener("submit", (event) => event.preventDefault());
  assume.addEventListener("input", () => { drawBytes(); showClasses(); });
  addEventListener("beforeprint", () => classList.more(MOST_PRINTED));
  drawBytes();
  showClasses();
}

// A finding's path drawn on the source: stretches of lines, each step below the line that it is about.

const CONTEXT = 2;
const MOST_STEPS = 40;

// Steps in one file at lines that do not go back belong together; a loop's way back begins a new stretch.
function stretches(steps) {
  const found = [];
  for (const [index, step] of steps.entries()) {
    const current = found.at(-1);
    const last = current?.at(-1);
    if (last && last.path === step.path && last.line <= step.line) current.push({ ...step, number: index + 1 });
    else found.push([{ ...step, number: index + 1 }]);
  }
  return found;
}

function sourceView(finding) {
  const view = element("div", { class: "source" });
  const shown = finding.steps.slice(0, MOST_STEPS);
  for (const stretch of stretches(shown)) {
    view.append(element("div", { class: "file" }, ...breakable(`${stretch[0].path}:${stretch[0].line}`)));
    view.append(stretchView(stretch, finding));
  }
  if (finding.steps.length > shown.length) {
    view.append(element("p", { class: "dim" }, `and ${finding.steps.length - shown.length} more steps`));
  }
  return view;
}

function stretchView(stretch, finding) {
  const lines = DATA.sources[stretch[0].path] || {};
  const code = element("div", { class: "code", tabindex: "0", role: "group", "aria-label": "source" });
  const steps = Map.groupBy ? Map.groupBy(stretch, (step) => step.line) : grouped(stretch);
  let before = null;
  for (const number of lineNumbers(stretch, lines)) {
    if (before !== null && number > before + 1) code.append(element("div", { class: "gap" }, "⋯"));
    code.append(lineView(number, lines[number], steps.get(number) || [], finding));
    for (const step of steps.get(number) || []) if (step.note) code.append(noteView(step));
    before = number;
  }
  return code;
}

function grouped(stretch) {
  const groups = new Map();
  for (const step of stretch) groups.set(step.line, [...(groups.get(step.line) || []), step]);
  return groups;
}

// The lines around the steps; a blank one at an edge says nothing.
function lineNumbers(stretch, lines) {
  const numbers = new Set();
  for (const step of stretch) {
    numbers.add(step.line);
    for (let number = step.line - CONTEXT; number <= step.line + CONTEXT; number++) {
      if (number in lines) numbers.add(number);
    }
  }
  const said = (number) => stretch.some((step) => step.line === number) || (lines[number]?.text ?? lines[number])?.trim();
  const inside = (number) => numbers.has(number - 1) && numbers.has(number + 1);
  return [...numbers].filter((number) => said(number) || inside(number)).sort((one, other) => one - other);
}

function lineView(number, source, steps, finding) {
  const row = element("div", { class: steps.length ? "line at" : "line" }, element("span", { class: "number" }, String(number)));
  if (source === undefined) return row.append(element("span", { class: "dim" }, "(source not at hand)")), row;
  if (typeof source === "string") source = { text: source, offset: 0, more: false };
  const text = element("span", { class: "text" });
  if (source.offset) text.append("…");
  text.append(...marked(source, steps, finding));
  if (source.more) text.append("…");
  row.append(text);
  return row;
}

// Columns count characters, JavaScript counts UTF-16 units: so the line is taken apart into characters first.
function marked(source, steps, finding) {
  const characters = [...source.text];
  const offset = source.offset;
  const pieces = [];
  let done = 0;
  for (const step of [...steps].sort((one, other) => one.column - other.column)) {
    const start = step.column - 1 - offset;
    if (start < done || start >= characters.length) continue;
    const own = step.path === finding.path && step.line === finding.line && step.column === finding.column;
    const end = own && finding.length ? start + finding.length : start + wordLength(characters, start);
    pieces.push(characters.slice(done, start).join(""));
    pieces.push(element("mark", { class: own ? finding.severity : "step" }, characters.slice(start, end).join("")));
    done = Math.min(end, characters.length);
  }
  return [...pieces, characters.slice(done).join("")];
}

function wordLength(characters, start) {
  let end = start;
  while (end < characters.length && /[\p{L}\p{N}_.]/u.test(characters[end])) end++;
  return Math.max(end - start, 1);
}

function noteView(step) {
  return element("div", { class: "note" }, element("b", { class: "step-number" }, String(step.number)), " ", ...prose(step.note));
}

// Rows of a hunk: a positive number is a line that stays, a negative one goes, a text is new.
function diffView(hunks) {
  const view = element("div", {});
  for (const [path, ...rows] of hunks) {
    const lines = DATA.sources[DATA.texts[path]] || {};
    const first = Math.abs(rows.find((row) => typeof row === "number") || 0);
    view.append(element("div", { class: "file" }, ...breakable(`${DATA.texts[path]}${first ? `:${first}` : ""}`)));
    const code = element("div", { class: "code diff", tabindex: "0", role: "group", "aria-label": "what the fix changes" });
    code.append(...rows.map((row) => diffRow(row, lines)));
    view.append(code);
  }
  return view;
}

function diffRow(row, lines) {
  if (typeof row === "string") return element("div", { class: "added" }, element("span", { class: "number" }), `+ ${row}`);
  const source = lines[Math.abs(row)];
  const text = typeof source === "string" ? source : `${source.offset ? "…" : ""}${source.text}${source.more ? "…" : ""}`;
  const number = element("span", { class: "number" }, String(Math.abs(row)));
  return row < 0 ? element("div", { class: "removed" }, number, `- ${text}`) : element("div", { class: "kept" }, number, `  ${text}`);
}

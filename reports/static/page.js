"use strict";
// The page's data, and the few ways in which anything is put on the page. Text goes into text nodes only.

const DATA = JSON.parse(document.getElementById("data").textContent);
for (const finding of DATA.findings) {
  finding.steps = finding.steps.map(([path, line, column, note]) => ({ path: DATA.texts[path], line, column, note: DATA.texts[note] }));
}
const SEVERITIES = ["error", "warning", "info"];

function element(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

// A message of poolaudit: what stands between backticks is code.
function prose(text) {
  const pieces = text.split("`");
  if (pieces.length % 2 === 0) return [text];
  return pieces.map((piece, number) => (number % 2 ? element("code", {}, piece) : piece));
}

// A path may be broken after its slashes, before anything else.
function breakable(path) {
  return path.split(/(?<=\/)/).flatMap((part) => [part, element("wbr")]);
}

function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
}

// A word for the shell: paths of the audited tree may hold anything.
function quoted(text) {
  if (text.startsWith("-")) text = `./${text}`;  // never an option
  return /^[\w./:=@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function copyButton(text) {
  return element("button", { type: "button", class: "copy", "data-copy": text, title: "Copy" }, text);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { class: "hidden" });  // a page opened from a file may have no clipboard
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await copy(button.dataset.copy);
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 1200);
});

// Light or dark: what the system says until the reader says otherwise; kept where storage is allowed.
function remembered(value) {
  try {
    if (value) localStorage.setItem("poolaudit-theme", value);
    return localStorage.getItem("poolaudit-theme");
  } catch {
    return value || null;
  }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function toggleTheme() {
  document.documentElement.dataset.theme = remembered(isDark() ? "light" : "dark") || "light";
}

if (remembered()) document.documentElement.dataset.theme = remembered();
byId("theme-button").addEventListener("click", toggleTheme);
byId("help-button").addEventListener("click", () => byId("help").showModal());

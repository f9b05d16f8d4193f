"use strict";
const held = JSON.parse(document.getElementById("data").textContent);

// The story of a cell: a mark, then (label, text); shown as text, never as markup.
function tell(kind, cell) {
  const [mark, ...lines] = held.stories[kind][cell];
  const box = document.getElementById(`story-${kind}`);
  const list = document.createElement("dl");
  lines.forEach(([label, text], i) => {
    if (i === 0) {
      const title = document.createElement("h3");
      title.textContent = `${mark} ${text}`;
      box.replaceChildren(title, list);
      return;
    }
    const term = document.createElement("dt");
    const said = document.createElement("dd");
    term.textContent = label;
    said.textContent = text;
    list.append(term, said);
  });
}

function draw(id, spec) {
  const kind = id in held.stories ? id : null;
  if (kind) tell(kind, held.first[kind]);
  const how = {
    mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false,
    tooltip: { theme: "custom", disableDefaultStyle: true },
  };
  return vegaEmbed(document.getElementById(id), spec, how).then(({ view }) => {
    if (!kind) return;
    view.addSignalListener("picked", (_, picked) => {
      if (picked.cell && picked.cell.length) tell(kind, picked.cell[0]);
    });
  });
}

// A cell of a table as something that orders: a number where all of its column are.
function number(text) {
  if (/^(nan|inf|nonfinite)/i.test(text)) return Infinity;
  const found = text.match(/^[×<≥±]?\s*([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)/i);
  return found ? Number(found[1].replaceAll(",", "")) : null;
}

function sort(table, column, head) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, text: row.cells[column].textContent.trim() }));
  const there = rows.filter((r) => r.text !== "");
  const numeric = there.every((r) => number(r.text) !== null);
  const before = head.getAttribute("aria-sort");
  const down = before ? before === "ascending" : numeric;
  const order = numeric ? (a, b) => number(a.text) - number(b.text) : (a, b) => a.text.localeCompare(b.text, "en", { numeric: true });
  there.sort((a, b) => (down ? order(b, a) : order(a, b)));
  body.append(...there.map((r) => r.row), ...rows.filter((r) => r.text === "").map((r) => r.row));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
}

for (const table of document.querySelectorAll("table.sorts")) {
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (event.target.closest("button")) sort(table, head.cellIndex, head);
  });
}

const tabs = [...document.querySelectorAll('[role="tab"]')];
for (const tab of tabs) {
  tab.addEventListener("click", () => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      document.getElementById(other.getAttribute("aria-controls")).classList.toggle("away", other !== tab);
    }
  });
}

Promise.all(Object.entries(held.charts).map(([id, spec]) => draw(id, spec))).then(() => {
  document.documentElement.dataset.drawn = "yes";
});

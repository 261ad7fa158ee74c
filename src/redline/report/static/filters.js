// Filters: nothing chosen means everything. A filter with one value only would choose nothing, so it is not shown.

const FILTERS = [
  ["model", "Model"],
  ["task", "Task"],
  ["recipe", "Recipe"],
  ["batch", "Batch"],
  ["place", "Device"],
  ["verdict", "Verdict"],
];
const chosen = new Map(FILTERS.map(([name]) => [name, new Set()]));

const valueOf = (row, name) => row[name] ?? "–";

function shownRows() {
  const active = [...chosen].filter(([, values]) => values.size);
  return ROWS.filter((row) => active.every(([name, values]) => values.has(String(valueOf(row, name)))));
}

function buildFilters(changed) {
  const form = document.getElementById("filters");
  if (!form) return;
  form.addEventListener("submit", (event) => event.preventDefault());
  const menus = [];
  for (const [name, label] of FILTERS) {
    const values = distinct(ROWS.map((row) => valueOf(row, name)));
    if (values.length < 2) continue;
    values.sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : 0));
    menus.push(filterMenu(name, label, values, changed));
  }
  const clear = element("button", { type: "button", id: "clear" }, "Clear filters");
  clear.addEventListener("click", () => {
    for (const values of chosen.values()) values.clear();
    for (const menu of menus) menu.reset();
    changed();
  });
  const shown = element("span", { class: "shown", id: "shown" });
  form.append(...menus.map((menu) => menu.details), clear, shown);
  document.addEventListener("click", (event) => {
    for (const menu of menus) if (!menu.details.contains(event.target)) menu.details.open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const menu of menus) menu.details.open = false;
  });
}

function filterMenu(name, label, values, changed) {
  const details = element("details", { "data-filter": name });
  const summary = element("summary");
  const menu = element("div", { class: "menu" });
  const boxes = [];
  const tell = () => {
    const picked = [...chosen.get(name)];
    summary.textContent = picked.length ? `${label}: ${picked.length > 2 ? `${picked.length} of ${values.length}` : picked.map((value) => cut(value)).join(", ")}` : `${label}: all`;
    summary.classList.toggle("set", picked.length > 0);
  };
  for (const value of values) {
    const row = element("label");
    const box = element("input", { type: "checkbox" });
    box.value = String(value);
    box.addEventListener("change", () => {
      if (box.checked) chosen.get(name).add(box.value);
      else chosen.get(name).delete(box.value);
      tell();
      changed();
    });
    boxes.push(box);
    row.append(box, element("span", { title: oneLine(value) }, cut(value, 90)));
    menu.append(row);
  }
  tell();
  details.append(summary, menu);
  return {
    details,
    reset: () => {
      for (const box of boxes) box.checked = false;
      tell();
    },
  };
}

function tellShown(rows) {
  const shown = document.getElementById("shown");
  if (!shown) return;
  shown.textContent = rows.length === ROWS.length ? `${ROWS.length} records` : `${rows.length} of ${ROWS.length} records`;
  document.getElementById("clear").disabled = ![...chosen.values()].some((values) => values.size);
}

// Filters: nothing chosen means everything. A filter with one value only would choose nothing, so it is not shown.

const FILTERS = [
  ["model", "Model"],
  ["task", "Task"],
  ["recipe", "Recipe"],
  ["batch", "Batch"],
  ["device", "Device"],
  ["trust", "Trust"],
];
const chosen = new Map(FILTERS.map(([name]) => [name, new Set()]));

const valueOf = (row, name) => row[name] ?? "–";

let wanted = "";

function shownRows() {
  const active = [...chosen].filter(([, values]) => values.size);
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  return ROWS.filter((row) => active.every(([name, values]) => values.has(String(valueOf(row, name)))) && words.every((word) => searched(row).includes(word)));
}
function searched(row) {
  row.words ??= [row.model, row.task, row.recipe, row.batch, row.setting, row.device, row.trust, row.bound, row.record_id].filter(known).join(" ").toLowerCase();
  return row.words;
}

// What is chosen stands in the address behind the #, so that a link shows the same.
function keepState() {
  const state = new URLSearchParams();
  for (const [name, values] of chosen) for (const value of values) state.append(name, value);
  if (wanted) state.set("q", wanted);
  if (sorting.changed) state.set("sort", `${sorting.down ? "-" : ""}${sorting.name}`);
  if (columnsChosen) for (const name of hiddenColumns) state.append("hide", name);
  for (const id of pinned) state.append("pin", id);
  for (const id of compared) state.append("compare", id);
  try {
    history.replaceState(null, "", `#${state}`);
  } catch {
    // A page inside a frame of its own may not change its address.
  }
}
function restoreState() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const [name, values] of chosen) for (const value of state.getAll(name)) values.add(value);
  wanted = state.get("q") ?? "";
  const sort = state.get("sort");
  const name = sort?.replace(/^-/, "");
  if (TABLE.some((column) => column.name === name)) Object.assign(sorting, { name, down: sort.startsWith("-"), changed: true });
  if (state.has("hide")) {
    columnsChosen = true;
    hiddenColumns = new Set(state.getAll("hide"));
  }
  for (const id of state.getAll("pin")) pinned.add(id);
  compared.push(...state.getAll("compare").slice(0, 2));
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
  const search = element("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search" });
  search.value = wanted;
  search.addEventListener("input", () => { wanted = search.value; changed(); });
  const clear = element("button", { type: "button", id: "clear" }, "Clear filters");
  clear.addEventListener("click", () => {
    for (const values of chosen.values()) values.clear();
    wanted = search.value = "";
    for (const menu of menus) menu.reset();
    changed();
  });
  const shown = element("span", { class: "shown", id: "shown" });
  form.append(...menus.map((menu) => menu.details), search, clear, shown);
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
    box.checked = chosen.get(name).has(box.value);
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
  shown.textContent = rows.length === ROWS.length ? `${ROWS.length} rows` : `${rows.length} of ${ROWS.length} rows`;
  document.getElementById("clear").disabled = !wanted && ![...chosen.values()].some((values) => values.size);
}

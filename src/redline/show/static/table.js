// The table: sorted by any column, a page at a time, and what is shown as CSV.

const PAGE = 50;
const TABLE = [
  { name: "recipe", label: "recipe", text: true, wide: true },
  { name: "model", label: "model", text: true, spare: true },
  { name: "task", label: "task", text: true, tight: true, spare: true },
  { name: "batch", label: "batch", show: (row) => row.batch ?? "–" },
  { name: "throughput", label: "items/s", show: (row) => `${row.shown.throughput ?? "–"}${known(row.sustained) ? ` (sustained ${row.shown.sustained})` : ""}` },
  { name: "ratio", label: "vs first", show: (row) => (row.shown.ratio ? `${row.shown.ratio}${[null, undefined, "baseline"].includes(row.compared_with) ? "" : ` of ${cut(row.compared_with, 14)}`}` : "–") },
  { name: "half_width", label: "±" },
  { name: "trust", label: "trust", text: true, tight: true },
  { name: "latency_p50", label: "p50" },
  { name: "latency_p95", label: "p95" },
  { name: "latency_p99", label: "p99" },
  { name: "memory", label: "memory" },
  { name: "rel_error", label: "rel. error", show: (row) => (row.shown.rel_error ? `${row.shown.rel_error}${row.sound ? "" : " ✗"}` : row.numerics ?? "–") },
  { name: "energy_per_item", label: "energy per item" },
  { name: "power", label: "power" },
  { name: "utilisation", label: "busy" },
  { name: "cost_per_million", label: "per million" },
  { name: "processes", label: "processes", show: (row) => row.processes ?? 1 },
  { name: "bound", label: "bound", text: true, tight: true },
  { name: "setting", label: "setting", text: true },
  { name: "device", label: "device", text: true, tight: true },
  { name: "measured_at", label: "when", text: true, tight: true, show: (row) => row.measured_at ?? "–" },
  { name: "record_id", label: "record", text: true, tight: true, show: (row) => row.record_id.slice(0, 13) },
].filter((column) => column.name === "memory" || ROWS.some((row) => known(row[column.name])));

const sorting = { name: "measured_at", down: true, changed: false };
let page = 0;
// On a phone only the numbers stay beside the recipe; the chooser brings the rest back.
let hiddenColumns = new Set(isNarrow() ? TABLE.filter((column) => !["recipe", "batch", "throughput", "ratio"].includes(column.name)).map((column) => column.name) : []);
// What a narrow page hides is not the reader's choice, so it does not go into the address.
let columnsChosen = false;
const opened = new Set();
const pinned = new Set();
const shownColumns = () => TABLE.filter((column) => !hiddenColumns.has(column.name));

function sorted(rows) {
  const key = (row) => row[sorting.name];
  const sign = sorting.down ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    // What is unknown stays at the end, whichever way.
    if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : one.number - other.number;
    if (typeof a === "string") return sign * a.localeCompare(b, undefined, { numeric: true }) || one.number - other.number;
    return sign * (a - b) || one.number - other.number;
  });
}

function buildTable(changed) {
  const head = document.querySelector("#table thead");
  if (!head) return;
  const line = element("tr");
  for (const column of TABLE) {
    const cell = element("th", { scope: "col", tabindex: "0", "data-column": column.name, ...(column.text ? { class: "text" } : {}) }, column.label);
    const sort = () => {
      sorting.down = sorting.name === column.name ? !sorting.down : !column.text;
      sorting.name = column.name;
      sorting.changed = true;
      page = 0;
      changed();
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        sort();
      }
    });
    line.append(cell);
  }
  head.append(line);
  buildChooser(changed);
  document.getElementById("previous").addEventListener("click", () => { page -= 1; changed(); });
  document.getElementById("next").addEventListener("click", () => { page += 1; changed(); });
  document.getElementById("download").addEventListener("click", download);
}

function drawTable(rows) {
  const body = document.querySelector("#table tbody");
  if (!body) return;
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  page = Math.min(Math.max(page, 0), pages - 1);
  for (const cell of document.querySelectorAll("#table th")) {
    if (cell.dataset.column === sorting.name) cell.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  for (const cell of document.querySelectorAll("#table th")) cell.hidden = hiddenColumns.has(cell.dataset.column);
  const ordered = sorted(rows).sort((one, other) => pinned.has(other.record_id) - pinned.has(one.record_id));
  body.replaceChildren(...ordered.slice(page * PAGE, (page + 1) * PAGE).flatMap((row) => (opened.has(row.record_id) ? [tableRow(row), detailRow(row)] : [tableRow(row)])));
  document.getElementById("count").textContent = `${rows.length} row${rows.length === 1 ? "" : "s"}, one for all processes of a recipe. Click a column to sort by it, a row for its details and its processes, two boxes to compare them; the download has what the filters leave, with every column.`;
  document.getElementById("page").textContent = `${page + 1} of ${pages}`;
  document.getElementById("previous").disabled = page === 0;
  document.getElementById("next").disabled = page === pages - 1;
  document.querySelector("#table .pages").hidden = pages === 1;
}

function tableRow(row) {
  const line = element("tr", { "data-record": row.record_id, tabindex: "0", ...(pinned.has(row.record_id) ? { class: "pinned" } : {}) });
  const toggle = () => {
    if (!opened.delete(row.record_id)) opened.add(row.record_id);
    drawTable(shownRows());
  };
  line.addEventListener("click", toggle);
  line.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
  for (const column of shownColumns()) {
    const classes = ["text", "tight", "wide"].filter((name) => column[name]).join(" ");
    const cell = element("td", classes ? { class: classes } : {});
    if (column.name === "trust") cell.append(...verdictChips(row));
    else if (column.name === "recipe") cell.append(compareBox(row), element("span", { title: oneLine(row.recipe) }, cut(row.recipe, 60)));
    else {
      const told = column.show ? column.show(row) : row.shown[column.name] ?? row[column.name] ?? "–";
      cell.textContent = column.text ? cut(told, 60) : told;
      if (known(row[column.name])) cell.title = column.name === "bound" ? row.bound_evidence ?? "" : column.name === "ratio" ? `against ${oneLine(row.compared_with ?? "the first")}` : oneLine(row[column.name]);
    }
    line.append(cell);
  }
  return line;
}

// A box to tick: two of them make the view of before and after.
function compareBox(row) {
  const box = element("input", { type: "checkbox", class: "compare", "aria-label": `compare ${oneLine(row.recipe)}`, title: "tick two rows to compare them" });
  box.checked = compared.includes(row.record_id);
  box.addEventListener("click", (event) => event.stopPropagation());
  box.addEventListener("change", () => toggleCompared(row.record_id));
  return box;
}

function detailRow(row) {
  const line = element("tr", { class: "detail" });
  const cell = element("td", { colspan: String(shownColumns().length) });
  const pin = element("button", { type: "button", class: "pin" }, pinned.has(row.record_id) ? "Unpin" : "Pin to the top");
  pin.addEventListener("click", () => {
    if (!pinned.delete(row.record_id)) pinned.add(row.record_id);
    keepState();
    drawTable(shownRows());
  });
  const list = element("dl");
  const facts = [
    ["what", workloadName(row)], ["recipe", row.recipe], ["speed", speedText(row)],
    ["processes", row.processes], ["latency", row.shown.latency_p50 ? `p50 ${row.shown.latency_p50}, p95 ${row.shown.latency_p95 ?? "n/a"}, p99 ${row.shown.latency_p99 ?? "n/a"}` : null],
    ["bound", known(row.bound) ? `${row.bound}: ${row.bound_evidence ?? ""}` : null], ["trust", [row.trust, row.notes].filter(Boolean).join(": ")], ["failed", row.failure],
    ["roofline", row.shown.headroom ? `${row.shown.headroom} left` : null], ["record", row.record_id],
  ];
  for (const [name, told] of facts) if (told) list.append(element("dt", {}, name), element("dd", {}, oneLine(told)));
  const processes = PAYLOAD.processes[row.number] ?? [];
  if (processes.length) {
    const each = processes.map(([id, speed, verdict]) => `${id.slice(0, 13)}: ${known(speed) ? rate(speed, row.item) : "no speed"}, ${verdict}`);
    list.append(element("dt", {}, "each process"), element("dd", { class: "each" }, each.join("\n")));
  }
  cell.append(list, pin);
  if (row.command) cell.append(" ", element("code", {}, row.command), " ", element("button", { type: "button", class: "copy", "data-copy": row.command }, "Copy command"));
  line.append(cell);
  return line;
}

function buildChooser(changed) {
  const details = element("details", { class: "chooser" });
  const menu = element("div", { class: "menu" });
  for (const column of TABLE.slice(1)) {
    const label = element("label");
    const box = element("input", { type: "checkbox", "data-show": column.name });
    box.checked = !hiddenColumns.has(column.name);
    box.addEventListener("change", () => {
      columnsChosen = true;
      if (box.checked) hiddenColumns.delete(column.name);
      else hiddenColumns.add(column.name);
      changed();
    });
    label.append(box, element("span", {}, column.label));
    menu.append(label);
  }
  details.append(element("summary", {}, "Columns"), menu);
  document.getElementById("download").before(details);
}

function verdictChips(row) {
  if (row.failure) return [element("span", { class: "chip bad", title: oneLine(row.failure ?? "") }, "failed")];
  const chips = (row.trust ?? "").split(", ").filter(Boolean).map((label) => element("span", { class: `chip ${label === "valid" ? "good" : label === "invalid" ? "bad" : "warn"}`, title: oneLine(row.notes ?? "") }, label));
  if (!row.sound) chips.push(element("span", { class: "chip bad", title: oneLine(row.notes ?? "") }, "numerics ✗"));
  return chips.flatMap((chip, place) => (place ? [" ", chip] : [chip]));
}

function csvCell(value) {
  if (!known(value)) return "";
  if (typeof value !== "string") return String(value);
  // No spreadsheet shall take a name for a formula, nor a newline for a new row.
  const line = value.split(/[\n\r\u000b\u000c\u001c-\u001e\u0085\u2028\u2029]+/).join(" ");
  const safe = /^[\t\r\n]/.test(value) || /^\s*[=+\-@]/.test(line) ? `'${line}` : line;
  return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

function csvText(rows) {
  const names = PAYLOAD.csv_columns;
  return [names.join(","), ...sorted(rows).map((row) => names.map((name) => csvCell(row.raw[name] ?? row[name])).join(","))].join("\n") + "\n";
}

function download() {
  const place = URL.createObjectURL(new Blob([csvText(shownRows())], { type: "text/csv;charset=utf-8" }));
  const link = element("a", { href: place, download: "redline-results.csv" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(place), 10000);
}

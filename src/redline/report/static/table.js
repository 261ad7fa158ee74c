// The table: sorted by any column, a page at a time, and what is shown as CSV.

const PAGE = 50;
const TABLE = [
  { name: "model", label: "model", text: true },
  { name: "task", label: "task", text: true, tight: true },
  { name: "recipe", label: "recipe", text: true, wide: true },
  { name: "batch", label: "batch", show: (row) => row.batch ?? "–" },
  { name: "throughput_per_s", label: "items/s", show: (row) => (known(row.throughput_per_s) ? figure(row.throughput_per_s, 4) : "–") },
  { name: "half_width", label: "±", show: (row) => (known(row.throughput_low) ? percent((row.throughput_high - row.throughput_low) / 2 / row.throughput_per_s) : "–") },
  { name: "verdict", label: "verdict", text: true, tight: true },
  { name: "latency_p50_s", label: "p50", show: (row) => (known(row.latency_p50_s) ? seconds(row.latency_p50_s) : "–") },
  { name: "latency_p95_s", label: "p95", show: (row) => (row.failure_kind ? "–" : seconds(row.latency_p95_s)) },
  { name: "latency_p99_s", label: "p99", show: (row) => (row.failure_kind ? "–" : seconds(row.latency_p99_s)) },
  { name: "ratio", label: "vs first", show: (row) => (known(row.ratio) ? `${figure(row.ratio)}×${known(row.ratio_low) ? ` (${figure(row.ratio_low)}–${figure(row.ratio_high)})` : ""}${[null, undefined, "baseline"].includes(row.first_recipe) ? "" : ` of ${cut(row.first_recipe, 14)}`}` : "–") },
  { name: "held_bytes", label: "memory", show: (row) => (known(row.held_bytes) ? bytes(row.held_bytes) : "–") },
  { name: "rel_l2", label: "rel. error", show: (row) => (row.numerics_state === "reference" ? "fp32" : ["passed", "failed"].includes(row.numerics_state) ? `${errorText(row)}${row.sound ? "" : " ✗"}` : "–") },
  { name: "bound", label: "bound", text: true, tight: true },
  { name: "setting", label: "setting", text: true },
  { name: "place", label: "device", text: true, tight: true },
  { name: "created_at", label: "when", text: true, tight: true, show: (row) => row.created_at?.slice(0, 16).replace("T", " ") ?? "–" },
  { name: "record_id", label: "record", text: true, tight: true, show: (row) => row.record_id.slice(0, 13) },
].filter((column) => column.name === "half_width" || column.name === "held_bytes" || ROWS.some((row) => known(row[column.name])));

const sorting = { name: "created_at", down: true };
let page = 0;

function sorted(rows) {
  const key = (row) => (sorting.name === "half_width" ? (known(row.throughput_low) ? (row.throughput_high - row.throughput_low) / row.throughput_per_s : null) : row[sorting.name]);
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
  body.replaceChildren(...sorted(rows).slice(page * PAGE, (page + 1) * PAGE).map(tableRow));
  document.getElementById("count").textContent = `${rows.length} record${rows.length === 1 ? "" : "s"}. Click a column to sort by it; the download has what the filters leave, with every column.`;
  document.getElementById("page").textContent = `${page + 1} of ${pages}`;
  document.getElementById("previous").disabled = page === 0;
  document.getElementById("next").disabled = page === pages - 1;
  document.querySelector("#table .pages").hidden = pages === 1;
}

function tableRow(row) {
  const line = element("tr", { "data-record": row.record_id });
  for (const column of TABLE) {
    const classes = ["text", "tight", "wide"].filter((name) => column[name]).join(" ");
    const cell = element("td", classes ? { class: classes } : {});
    if (column.name === "verdict") cell.append(...verdictChips(row));
    else {
      const told = column.show ? column.show(row) : row[column.name] ?? "–";
      cell.textContent = column.text ? cut(told, 60) : told;
      if (known(row[column.name])) cell.title = column.name === "bound" ? row.bound_evidence ?? "" : column.name === "ratio" ? `against ${oneLine(row.first_recipe ?? "the first")}` : oneLine(row[column.name]);
    }
    line.append(cell);
  }
  return line;
}

function verdictChips(row) {
  if (row.failure_kind) return [element("span", { class: "chip bad", title: oneLine(row.failure_message ?? "") }, `failed: ${row.failure_kind}`)];
  const chips = (row.verdict ?? "").split(";").filter(Boolean).map((label) => element("span", { class: `chip ${label === "valid" ? "good" : label === "invalid" ? "bad" : "warn"}`, title: oneLine(row.trust_reasons ?? "") }, label));
  if (!row.sound) chips.push(element("span", { class: "chip bad", title: oneLine(row.numerics_reason ?? "") }, "numerics ✗"));
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
  return [names.join(","), ...sorted(rows).map((row) => names.map((name) => csvCell(row[name])).join(","))].join("\n") + "\n";
}

function download() {
  const place = URL.createObjectURL(new Blob([csvText(shownRows())], { type: "text/csv;charset=utf-8" }));
  const link = element("a", { href: place, download: "redline-results.csv" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(place), 10000);
}

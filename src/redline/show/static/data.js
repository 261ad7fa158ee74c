// The payload as rows, and how numbers and names are written. Names are anyone's to write: they only ever become text.

const PAYLOAD = JSON.parse(document.getElementById("data").textContent);

function unpacked(columns, count) {
  const rows = Array.from({ length: count }, (_, number) => ({ number }));
  for (const [name, column] of Object.entries(columns)) {
    const texts = column.texts;
    for (const row of rows) row[name] = texts ? (column.at[row.number] === null ? null : texts[column.at[row.number]]) : column[row.number];
  }
  return rows;
}
const ROWS = unpacked(PAYLOAD.columns, PAYLOAD.count);
// What every output writes for a figure. One that nobody could use has no number, in charts either; the download keeps it.
for (const row of ROWS) Object.assign(row, { shown: {}, raw: {} });
for (const [name, column] of Object.entries(PAYLOAD.shown)) {
  ROWS.forEach((row, number) => {
    if (column.at[number] === null) return;
    row.shown[name] = column.texts[column.at[number]];
    if (row.shown[name] !== "too noisy") return;
    for (const part of [name, `${name}_low`, `${name}_high`]) [row.raw[part], row[part]] = [row[part], null];
  });
}
for (const row of ROWS) {
  row.trusted = row.trust === "valid";
  row.sound = row.numerics !== "wrong";
  row.series = `${row.subject}\u0000${row.recipe}`;
}

// Tables of the report that are drawn: each line with the row that it is about, where the page has that.
const LINES = Object.fromEntries(Object.entries(PAYLOAD.tables).map(([name, table]) => [name, unpacked(table.columns, table.rows.length).map((line, at) => ({ ...line, about: ROWS[table.rows[at]] }))]));
// The lines of one table, together by what `key` says, of those that are about rows which the filters leave.
function linesOf(name, rows, key = (line) => line.record_id) {
  const shown = new Set(rows.map((row) => row.number));
  return [...Map.groupBy((LINES[name] ?? []).filter((line) => !line.about || shown.has(line.about.number)), key).values()];
}

const known = (value) => value !== null && value !== undefined;
const distinct = (values) => [...new Set(values)];

function figure(value, digits = 3) {
  if (!known(value)) return "n/a";
  const size = Math.abs(value);
  const decimals = size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(decimals, 12)).replace(/\B(?=(\d{3})+(?!\d)(?<!\.\d*))/g, "\u2009");
}
function seconds(value) {
  if (!known(value)) return "n/a";
  const size = Math.abs(value);
  if (size >= 1) return `${figure(value)} s`;
  return size >= 1e-3 ? `${figure(value * 1e3)} ms` : `${figure(value * 1e6)} µs`;
}
function bytes(value) {
  if (!known(value)) return "n/a";
  for (const [factor, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(value) >= factor) return `${figure(value / factor)} ${unit}`;
  }
  return `${value} B`;
}
const rate = (value, item) => (known(value) ? `${figure(value, Math.max(3, String(Math.round(value)).length))} ${item || "items"}/s` : "n/a");
const percent = (value) => (known(value) ? `${figure(value * 100, 2)} %` : "n/a");

const oneLine = (text) => String(text).replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069]+/g, " ");
function cut(text, most = 34) {
  const line = oneLine(text);
  return [...line].length <= most ? line : `${[...line].slice(0, most - 9).join("")}…${[...line].slice(-8).join("")}`;
}
// plotly reads a few tags and entities in any text it is given: they are spelled out.
const plain = (text, most) => (most ? cut(text, most) : oneLine(text)).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function element(tag, attributes = {}, text = null) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

// What the rows have in common need not be said with each of them.
const speedText = (row) => (known(row.throughput) ? `${row.shown.throughput} ${row.item || "items"}/s` : row.shown.throughput);
const ratioText = (row) => (row.shown.ratio ? `${row.shown.ratio} against ${row.compared_with ?? "the first"}` : null);
const SEVERAL_PLACES = distinct(ROWS.map((row) => row.device)).length > 1;
// What a series is called beside others: the recipe, and whatever else tells them apart.
function namer(rows, without = []) {
  const telling = ["model", "task", "setting", "device"].filter((name) => !without.includes(name) && distinct(rows.map((row) => row[name] ?? "")).length > 1);
  return (row) => [row.recipe, ...telling.map((name) => row[name]).filter(Boolean)].join(" · ");
}
function workloadName(row) {
  const batch = known(row.batch) ? [`batch ${row.batch}`] : [];
  return [row.model, row.task, row.setting, ...batch, SEVERAL_PLACES ? row.device : null].filter(Boolean).join(" · ");
}
function rowTold(row) {
  const lines = [
    `<b>${plain(row.recipe, 70)}</b>`,
    plain(`${row.model} · ${row.task}${known(row.batch) ? ` · batch ${row.batch}` : ""}`, 90),
    plain(row.device ?? "", 70),
  ];
  if (row.setting) lines.push(plain(row.setting, 70));
  if (row.failure) return [...lines, `failed: ${plain(row.failure, 120)}`].join("<br>");
  if (row.shown.throughput) lines.push(plain(speedText(row), 70));
  if (row.shown.latency_p50) lines.push(`p50 ${row.shown.latency_p50}, p95 ${row.shown.latency_p95 ?? "n/a"}, n ${row.samples}`);
  if (row.shown.ratio) lines.push(plain(ratioText(row), 80));
  if (known(row.memory)) lines.push(`memory ${row.shown.memory}`);
  if (row.shown.rel_error) lines.push(`rel. error ${row.shown.rel_error}${row.sound ? "" : " ✗ too far"}`);
  lines.push(`trust: ${plain(row.trust ?? "")}; bound: ${plain(row.bound ?? "")}`, `record ${plain(row.record_id)}`);
  return lines.join("<br>");
}

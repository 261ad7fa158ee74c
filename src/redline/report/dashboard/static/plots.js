// What all charts share: axes, legend, fonts, colours, and how much one chart can hold before nobody can read it.

const MOST_SERIES = 16;
const MOST_BARS = 30;
const CONFIG = { displayModeBar: false, responsive: true };

function isNarrow() {
  return window.innerWidth < 640;
}
function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 8, font: { size: 12.5, color: colour("muted") } },
    gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"),
    tickfont: { size: 12, color: colour("muted") }, automargin: true, ...more,
  };
}
function batchAxis(rows) {
  const batches = distinct(rows.map((row) => row.batch)).sort((a, b) => a - b);
  const ticks = batches.length <= 12 ? batches : batches.filter((_, place) => place % Math.ceil(batches.length / 12) === 0);
  return axis("batch", { type: "log", tickvals: ticks, ticktext: ticks.map(String) });
}
function layout(more = {}) {
  const narrow = isNarrow();
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 350,
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: 12.5, color: colour("ink") },
    margin: { l: 12, r: 14, t: 10, b: 12 }, hovermode: "closest", dragmode: narrow ? false : "zoom", bargap: 0.34,
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("muted"), align: "left", font: { size: 12.5, color: colour("ink"), family: "system-ui, sans-serif" } },
    legend: { orientation: "h", x: 0, xanchor: "left", y: -0.2, yanchor: "top", traceorder: "normal", font: { size: 12 }, itemwidth: 30 },
    ...more,
  };
}

// Rows of horizontal bars: places on the axis, names as their labels, so that two equal names stay two bars.
function barAxis(labels) {
  return axis("", { tickvals: labels.map((_, place) => place), ticktext: labels.map((label) => plain(label, isNarrow() ? 20 : 44)), autorange: "reversed", showgrid: false, ticks: "", title: { text: "" } });
}
function barHeight(bars, legend = 0) {
  return Math.max(150, 34 * bars + 70 + legend);
}
// Below bars of few rows a legend would lie on the axis; above them there is always room.
function barLegend() {
  return { legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 12 }, itemwidth: 30, ...(isNarrow() ? { entrywidth: 74, entrywidthmode: "pixels" } : {}) } };
}

// Rows by what they ran, so that a card shows one workload at a time; those with the most to compare come first.
function byWorkload(rows, weight) {
  const workloads = new Map();
  for (const row of rows) {
    const key = `${row.subject}\u0000${row.batch}`;
    if (!workloads.has(key)) workloads.set(key, []);
    workloads.get(key).push(row);
  }
  return [...workloads].sort((one, other) => compareLists(weight(other[1]), weight(one[1])));
}
function pickWorkload(section, workloads, redraw) {
  const key = pick(section, "workload", workloads.slice(0, 300).map(([each, rows]) => [each, workloadName(rows[0])]), redraw);
  return workloads.find(([each]) => each === key)[1];
}
function compareLists(one, other) {
  for (let place = 0; place < one.length; place += 1) if (one[place] !== other[place]) return one[place] - other[place];
  return 0;
}

// Lines against the batch: the newest record of each batch, series by series.
function batchSeries(rows) {
  const series = new Map();
  for (const row of rows) {
    if (!known(row.batch)) continue;
    if (!series.has(row.series)) series.set(row.series, new Map());
    const points = series.get(row.series);
    const before = points.get(row.batch);
    if (!before || better(row, before)) points.set(row.batch, row);
  }
  const lines = [...series.values()].map((points) => [...points.values()].sort((a, b) => a.batch - b.batch));
  return lines.sort((a, b) => b.length - a.length);
}
function better(row, before) {
  const rank = (each) => [each.failure_kind ? 0 : 1, each.kind === "run" ? 1 : 0, each.when ?? 0];
  const [one, other] = [rank(row), rank(before)];
  for (let place = 0; place < one.length; place += 1) if (one[place] !== other[place]) return one[place] > other[place];
  return false;
}
function limited(list, most, what) {
  const left = list.length - most;
  return [list.slice(0, most), left > 0 ? `Showing ${most} of ${list.length} ${what}; the filters above narrow it down.` : ""];
}
function pick(section, name, options, changed) {
  // A choice inside a card; what was chosen stays chosen while it is there to be chosen.
  const holder = section.querySelector(".picker");
  let select = holder.querySelector(`select[data-pick="${name}"]`);
  if (!select) {
    select = element("select", { "data-pick": name, "aria-label": name });
    select.addEventListener("change", changed);
    holder.append(select);
  }
  const before = select.value;
  select.replaceChildren(...options.map(([value, label]) => Object.assign(element("option", {}, cut(label, 80)), { value })));
  select.hidden = options.length < 2;
  if (options.some(([value]) => value === before)) select.value = before;
  return select.value;
}
